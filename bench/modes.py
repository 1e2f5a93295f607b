"""One device in every mode: step time and memory, predicted from the data sheet and measured.

    python bench/modes.py            # predicted
    python bench/modes.py --run      # and measured, on a GPU

A Llama of 956M parameters in bfloat16, 16 rows of 2048 tokens in 4 microbatches, fused AdamW.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import save

import piper
from piper.capture.trace.gpu_kernels import as_on_gpu
from piper.cli.simulate import machine_of
from piper.job.job import Job
from piper.job.options import Options
from piper.models.llama import Llama, LlamaConfig, cross_entropy

MODES = {
    "eager": {"graphs": False},
    "compiled": {"compiled": True, "graphs": False},
    "graphs": {"graphs": True},
    "both": {"compiled": True, "graphs": True},
}
FUSED = partial(torch.optim.AdamW, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Case:
    """Sizes of a model and of its batch."""

    config: LlamaConfig
    rows: int
    tokens: int
    microbatches: int = 4

    def model(self, device: str) -> torch.nn.Module:
        with torch.device(device):
            return Llama(self.config, stages=1).to(torch.bfloat16)

    def batch(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.rows, self.tokens
        made = [torch.randint(self.config.vocab, shape, device=device) for _ in range(2)]
        return made[0], made[1]

    @property
    def strategy(self) -> piper.Strategy:
        return piper.Strategy(
            [piper.Place(piper.where(), [0]), piper.Split("MB", self.microbatches)]
        )


CASES = {
    "956M": Case(
        LlamaConfig(vocab=32768, dim=2048, layers=16, heads=16, hidden=5632), rows=16, tokens=2048
    ),
    "135M": Case(
        LlamaConfig(vocab=32768, dim=768, layers=12, heads=12, hidden=2048), rows=8, tokens=512
    ),
    "long": Case(
        LlamaConfig(vocab=32768, dim=2048, layers=4, heads=16, hidden=5632),
        rows=2, tokens=16384, microbatches=2,
    ),
}  # fmt: skip


def predicted(case: Case, device: str) -> dict[str, dict[str, float]]:
    """Seconds and GiB in each mode. The model is captured once."""
    job = Job(case.model("meta"), cross_entropy, case.strategy, Options(device="cpu"))
    example, found = job.example(case.batch("cpu")), {}
    for name, options in MODES.items():
        mode = replace(job, options=Options(device="cpu", **options))
        with as_on_gpu():
            _, compiled = mode.compile(example)
        _, prediction = machine_of(device, None, None, None).price(compiled)
        held = {what: size / 2**30 for what, size in prediction.peaks[0].held.items() if size}
        found[name] = {"ms": 1e3 * prediction.seconds, "GiB": prediction.peak / 2**30, **held}
    return found


def measured(case: Case, options: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    trainer = piper.Trainer(
        case.model("cpu"), cross_entropy, case.strategy, example=case.batch("cuda"),
        optimizer=FUSED, **options,
    )  # fmt: skip
    batch, times = case.batch("cuda"), []
    for _ in range(9):
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.step(*batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peak = peak_of_steps()
    reserved = torch.cuda.max_memory_reserved() / 2**30
    found = {"ms": 1e3 * sorted(times[3:])[3], "GiB": peak / 2**30, "reserved": reserved}
    found |= by_kind()
    trainer.close()
    return found


def by_kind() -> dict[str, float]:
    """GiB after the steps: of live tensors, of the graphs' pool, of both with gaps, of cuBLAS.

    The peak is the largest that live tensors were outside of the pool of the graphs.
    """
    kinds: dict[str, float] = defaultdict(float)
    for segment in torch.cuda.memory_snapshot():
        pool = "default" if segment["segment_pool_id"] == (0, 0) else "graphs"
        kinds[f"{pool} reserved"] += segment["total_size"] / 2**30
        kinds[f"{pool} live"] += segment["active_size"] / 2**30
    kinds["peak of live tensors"] = torch.cuda.max_memory_allocated() / 2**30
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    kinds["cuBLAS"] = (before - torch.cuda.memory_allocated()) / 2**30
    return dict(kinds)


def peak_of_steps() -> int:
    """No tensor holds the memory of CUDA graphs between steps, but it stays reserved."""
    torch.cuda.empty_cache()
    return max(torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--cases", nargs="*", default=["956M"], choices=CASES)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for name in chosen.cases:
        expected = predicted(CASES[name], chosen.device)
        for mode in chosen.modes:
            row = {"predicted": expected[mode]}
            if chosen.run:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                row["measured"] = measured(CASES[name], MODES[mode])
            results[f"{name} {mode}"] = row
            print(name, mode, row, flush=True)
    if chosen.run:
        save(f"modes_{chosen.device}", results)


if __name__ == "__main__":
    main()
