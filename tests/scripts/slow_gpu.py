"""One GPU is slow: `Metrics.slowest` must name it, and the region in which it loses its time.

    piper run -n 4 --share-gpu tests/scripts/slow_gpu.py

An operator in the second region does more matrix products in one process than in the others. The
host does not notice: it queues them. Without them, nobody must be named. Then: what the marks cost.
With PIPER_DEVICE=cpu it runs without a GPU.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import piper
from piper.job.processes.stragglers import WINDOW
from piper.runtime.observe import gpu_time
from piper.strategies import one_f_one_b

DEVICE = os.environ.get("PIPER_DEVICE", "cuda")
HOW = {"eager": {"graphs": False}, "graphs": {"graphs": True}, "auto": {}}
BLOCKS, BLOCK = 12, 40  # of steps with marks, and as many without
STEPS = gpu_time.EVERY * (WINDOW + 8)  # enough to compare, and to look where the time is lost
extra = 0  # matrix products of this process


@torch.library.custom_op("slow_gpu::busy", mutates_args=())
def busy(x: Tensor) -> Tensor:
    found = x
    for _ in range(extra):
        found = torch.mm(found, x.mT @ x)
        found = found / found.norm()
    return x.clone()


@busy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


busy.register_autograd(lambda ctx, grad: grad)


class Net(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            with piper.annotate("PP", k):
                x = torch.relu(layer(busy(x) if k == 1 else x))
        return x


def trained(
    strategy: object, slow: int | None, products: int, width: int, rows: int, how: str
) -> tuple[object, float]:
    """What this process knows of the slowest one in the end, and the seconds of a step."""
    global extra
    rank = int(os.environ["RANK"])
    extra = products if rank == slow else 0
    torch.manual_seed(0)
    model = Net(4, width)
    torch.manual_seed(1)
    batch = torch.randn(rows, width, device=DEVICE), torch.randn(rows, width, device=DEVICE)
    trainer = piper.Trainer(
        model.to(DEVICE), nn.functional.mse_loss, strategy, example=batch, device=DEVICE,
        **HOW[how] if DEVICE == "cuda" else {},
    )  # fmt: skip
    found, began = None, 0.0
    for number in range(STEPS):
        if number == STEPS // 2:
            settle()
            began = time.perf_counter()
        found = trainer.step(*batch).slowest
    settle()
    seconds = (time.perf_counter() - began) / (STEPS - STEPS // 2)
    trainer.close()
    return found, seconds


def settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--products", type=int, default=6)
    parser.add_argument("--how", nargs="+", choices=HOW, default=[*HOW])
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of the run itself; this prints what it finds
    size = options.width, options.rows
    say(f"{'strategy':10} {'how':8} {'slow':5} result")
    for name, strategy in {
        "dp4": one_f_one_b(pp=1, dp=4, microbatches=2),
        "pp2 x dp2": one_f_one_b(pp=2, dp=2, microbatches=4),
    }.items():
        for how in options.how if DEVICE == "cuda" else ["eager"]:
            for slow in (None, 2):  # in a pipeline, it has the first stage
                given = strategy, slow, options.products, *size, how
                found, seconds = trained(*given)
                who = None if found is None else found.device
                where = "" if found is None else found.where
                at = "PP1:F" if how == "eager" else "PP"  # a graph has several regions
                good = who == slow and (found is None or where.startswith(at))
                verdict = "ok" if good else "WRONG"
                text = f"{verdict}  step {1e3 * seconds:.2f} ms  {found}"
                say(f"{name:10} {how:8} {'-' if slow is None else slow!s:5} {text}")
    if DEVICE == "cuda":
        cost(one_f_one_b(pp=2, dp=2, microbatches=8))


def cost(strategy: object) -> None:
    """Small work, so that the host is the slower one: whatever it does more shows.

    Steps with marks and without take turns.
    """
    torch.manual_seed(0)
    batch = torch.randn(64, 256, device=DEVICE), torch.randn(64, 256, device=DEVICE)
    trainer = piper.Trainer(
        Net(4, 256).to(DEVICE), nn.functional.mse_loss, strategy, example=batch, graphs=False
    )
    times: dict[int, list[float]] = {gpu_time.EVERY: [], 10**9: []}
    for number in range(2 * BLOCKS):
        gpu_time.EVERY = [*times][number % 2]
        settle()
        began = time.perf_counter()
        for _ in range(BLOCK):
            trainer.step(*batch)
        settle()
        times[gpu_time.EVERY].append((time.perf_counter() - began) / BLOCK)
    trainer.close()
    marked, plain = (f"{1e6 * median(row):.0f}" for row in times.values())
    pairs = zip(*times.values(), strict=True)
    say(f"a step of little work takes {marked} us with marks, {plain} us without, in the median")
    say(f"neighbours differ by {1e6 * median(a - b for a, b in pairs):.0f} us in the median")
    say(f"a mark takes the host {1e6 * one_mark():.2f} us")


def one_mark() -> float:
    """Seconds that the host takes to record an event."""
    event, count = gpu_time.cuda_event(), 1000
    event.record()
    began = time.perf_counter()
    for _ in range(count):
        event.record()
    return (time.perf_counter() - began) / count


def say(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.barrier()
