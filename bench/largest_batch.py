"""The largest batch under pipelines and ZeRO, computed for devices that one does not have.

    python bench/largest_batch.py [--pp 8] [--dp 4] [--gib 80] [--length 1024]

The paper's mixture of 9 billion parameters in bf16 with masters in float32 and AdamW, 1F1B. Memory
is that of the plan, which agrees with what a GPU holds to a few percent (bench/gpu.py --group
memory). Torch's pipelining with FSDP2 keeps whole gradients until the end of a step: that is
`reduce="once"`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import save

from piper import strategies
from piper.job.job import Job
from piper.job.options import Options
from piper.models.qwen3_moe import PRESETS, Qwen3Moe, moe_loss
from piper.plan.analyse.memory import peak

CONFIG = PRESETS["9B"]
FEW: dict[str, Any] = {"reduce": "each", "gather_buffers": 2}  # as little as possible
WAYS: dict[str, dict[str, Any]] = {
    "zero=2": {"zero": 2, "reduce": "each"},
    "zero=3": {"zero": 3, **FEW},
    "zero=3, remat": {"zero": 3, **FEW, "remat": True},
    "whole gradients and parameters": {"zero": 1},
    "whole gradients": {"zero": 3, "reduce": "once", "gather_buffers": 2},
}


def held(job: Job, rows: int, length: int) -> int:
    """The most bytes of any device, with so many rows in a microbatch."""
    tokens = torch.zeros(rows * job.microbatches, length, dtype=torch.int64)  # of one replica
    _, compiled = job.compile(job.example((tokens, tokens)), by_role=True)
    return max(peak(compiled.dag, plan, staging=0).total for plan in compiled.plans)


def largest(chosen: argparse.Namespace, model: Qwen3Moe, options: dict[str, Any]) -> dict[str, Any]:
    """Memory grows in a straight line with the rows: two numbers of them tell the most."""
    strategy = strategies.one_f_one_b(
        pp=chosen.pp, dp=chosen.dp, microbatches=chosen.microbatches, **options
    )
    job = Job(model, moe_loss, strategy, Options(precision="bf16", graphs=False))
    one, two = (held(job, rows, chosen.length) for rows in (1, 2))
    most = int((chosen.gib * 2**30 - one) // (two - one)) + 1
    return {"rows": max(most, 0), "one": one / 2**30, "each": (two - one) / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--gib", type=float, default=80.0)
    parser.add_argument("--out", default="largest_batch")
    chosen = parser.parse_args()
    with torch.device("meta"):
        model = Qwen3Moe(CONFIG, chosen.pp)
    found = {name: largest(chosen, model, options) for name, options in WAYS.items()}
    for name, one in found.items():
        print(f"{name:32} {one['rows']:3} rows, {one['one']:.1f} GiB for 1, {one['each']:.2f} each")
    save(chosen.out, {"settings": vars(chosen), "largest": found})


if __name__ == "__main__":
    main()
