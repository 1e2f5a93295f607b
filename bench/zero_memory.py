"""PP=2 x DP=2: the largest microbatch that fits a given memory, beside pipelining x FSDP2.

    python bench/zero_memory.py [--budget 64] [--schedules 1f1b]

Memory is the peak of all tensors in a step (parameters, optimizer state, gradients, activations,
communication buffers), measured the same way for all. It grows linearly with the rows of a
microbatch, so two measurements predict the largest number of rows. That number and one row more are
then measured. For Piper, the prediction of the compiler is printed, too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import save
from links import launch
from models import Stage, Staged, batch
from peers import ADAMW, SCHEDULES, Data, pipelined
from torch import Tensor

import piper
from piper.job.batch.batch import Batch
from piper.models.llama import LlamaConfig, cross_entropy, rotary_tables
from piper.plan.analyse.memory import peak

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from memory_meter import Meter  # noqa: E402

PP, DP, PARTS = 2, 2, 4
Measured = tuple[int, int | None]  # bytes: measured, and predicted by the compiler


class Layered(Stage):
    """Layers are regions, too, because Piper gathers region by region, and FSDP2 layer by layer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = rotary_tables(self.config, x[..., 0] if x.dim() == 3 else x, x.dtype)
        for block in self.blocks:
            with piper.annotate("L"):
                x = block(x, cos, sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def make(config: LlamaConfig, stages: int) -> Staged:
    model = Staged(config, stages)
    for stage in model.stages:
        stage.__class__ = Layered
    return model


def piper_memory(zero: int, name: str, config: LlamaConfig, data: Data) -> Measured:
    strategy = piper.strategies.BUILDERS[name](pp=PP, microbatches=PARTS, dp=DP, zero=zero)
    model = make(config, PP * SCHEDULES[name][1])
    trainer = piper.Trainer(model, cross_entropy, strategy, optimizer=ADAMW, example=data)
    state = trainer._programs.state
    states = [tensor for bucket in state.buckets.values() for tensor in bucket.tensors]
    states += [buffer.flat for buffer in state.buffers.values()]
    outside = [*data, *model.parameters(), *model.buffers()]  # looked at, and not Piper's
    measured = metered(lambda: trainer.step(*data), states, outside)
    _, compiled = trainer._job.compile(Batch.of(data))
    trainer.close()
    return measured, peak(compiled.dag, compiled.plan(dist.get_rank())).total


def peer_memory(reshard: bool, name: str, config: LlamaConfig, data: Data) -> Measured:
    model = make(config, PP * SCHEDULES[name][1])
    step = pipelined(name, model, data, PARTS, PP, reshard=reshard)
    rank = dist.get_rank() % PP
    mine = [model.stages[k] for k in range(rank, len(model.stages), PP)]
    states = [parameter for stage in mine for parameter in stage.parameters()]
    return metered(step, states, data), None


def metered(step: Callable[[], object], states: list[Tensor], data: Iterable[Tensor]) -> int:
    """The peak of the second step. The first one makes optimizer state."""
    with Meter(states, data) as meter:
        step()
        meter.peak = 0
        step()
    return meter.peak


def everywhere(found: Measured) -> Measured:
    """The rank that needs most decides."""
    both = torch.tensor([found[0], found[1] or 0])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return int(both[0]), int(both[1]) or None


CONTENDERS = {
    **{f"piper zero={zero}": partial(piper_memory, zero) for zero in range(4)},
    "pipelining x fsdp2, keep": partial(peer_memory, False),
    "pipelining x fsdp2, reshard": partial(peer_memory, True),
}


def largest(
    memory: Callable[..., Measured], name: str, config: LlamaConfig, length: int, budget: int
) -> dict[str, object]:
    """Rows of the largest microbatch that fits, and all measurements on the way."""
    seen: dict[int, Measured] = {}

    def measure(rows: int) -> int:
        whole = batch(config, DP * PARTS * rows, length)
        mine = dist.get_rank() // PP
        data = tuple(tensor.chunk(DP)[mine].contiguous() for tensor in whole)
        seen[rows] = everywhere(memory(name, config, data))
        return seen[rows][0]

    small, large = measure(2), measure(6)
    slope = (large - small) / 4
    rows = max(1, int((budget - small) / slope) + 2) if small < budget + slope else 0
    while rows and measure(rows) > budget:
        rows -= 1
    if rows and rows + 1 not in seen:
        assert measure(rows + 1) > budget
    return {"rows": rows, "slope": slope, "seen": {k: list(v) for k, v in seen.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=64.0, help="MiB of each rank")
    parser.add_argument("--schedules", nargs="*", default=["1f1b"], choices=SCHEDULES)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        launch(str(Path(__file__).resolve()), sys.argv[1:], PP * DP)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = LlamaConfig(vocab=512, dim=chosen.dim, layers=chosen.layers, heads=4)
    results: dict[str, object] = {}
    for name in chosen.schedules:
        for who, memory in CONTENDERS.items():
            found = largest(memory, name, config, chosen.length, int(chosen.budget * 2**20))
            results[f"{name}, {who}"] = found
            if dist.get_rank() == 0:
                last = found["seen"][found["rows"] or 2]  # type: ignore[index]
                computed = f", computed {last[1] / 2**20:.1f}" if last[1] else ""
                print(
                    f"{name}, {who:28} {found['rows']:3} rows in {chosen.budget:.0f} MiB "
                    f"(measured {last[0] / 2**20:.1f} MiB{computed}; "
                    f"{found['slope'] / 2**20:.2f} MiB a row)",
                    flush=True,
                )
    if dist.get_rank() == 0:
        save("zero_memory", results)
    dist.barrier()


if __name__ == "__main__":
    main()
