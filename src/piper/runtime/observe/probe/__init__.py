"""Measure this machine: the links between its processes, and the speed of its cores together.

`piper.job.programs.profiling` starts several processes that run this. The first one writes the
result.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from piper.runtime.processes.gathering import everyone

LARGE, SMALL = 4 * 2**20, 1  # elements of four bytes
TRIES = 9
WORK = 0.15  # seconds of a calibrated piece of work


def main(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {**links(), "cores": cores()}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


def links() -> dict[str, float]:
    """Between the first two processes: a small message, a large one, and their CPU time."""
    if dist.get_rank() > 1:
        dist.barrier()
        return {}
    latency = best(lambda: pingpong(SMALL)) / 2
    large = best(lambda: pingpong(LARGE)) / 2
    used = time.process_time()
    for _ in range(TRIES):
        pingpong(LARGE)
    wire = (time.process_time() - used) / (2 * TRIES * 4 * LARGE)
    post = best(posting)
    dist.barrier()
    link = 4 * LARGE / max(large - latency, 1e-9)
    return {"latency": latency, "link": link, "wire": wire, "post": post}


def best(measure: Callable[[], float]) -> float:
    """The shortest of several tries: the others had to wait for a core."""
    return min(measure() for _ in range(TRIES))


def pingpong(size: int) -> float:
    """Seconds of a round trip."""
    rank, tensor = dist.get_rank(), torch.zeros(size)
    started = time.perf_counter()
    for sender in (0, 1):
        message = dist.isend if sender == rank else dist.irecv
        work = message(tensor, 1 - rank)
        assert work is not None
        work.wait()
    return time.perf_counter() - started


def posting() -> float:
    """Seconds to start a message."""
    rank, tensor = dist.get_rank(), torch.zeros(1024)
    started = time.perf_counter()
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    took = time.perf_counter() - started
    assert work is not None
    work.wait()
    return took


def cores() -> float:
    """The throughput of all processes together, in units of one process alone."""
    rounds = calibrated()
    alone = 0.0
    for turn in range(world()):  # one after the other
        dist.barrier()
        alone = timed(rounds) if turn == dist.get_rank() else alone
    dist.barrier()
    together = statistics.median([timed(rounds) for _ in range(3)])
    ones, alls = zip(*everyone((alone, together), "the speed of cores"), strict=True)
    return world() * statistics.median(ones) / statistics.median(alls)


def world() -> int:
    return dist.get_world_size()


def calibrated() -> int:
    """The number of rounds that take about `WORK` seconds, the same for all processes."""
    work()
    started = time.perf_counter()
    work()
    rounds = torch.tensor(max(1, int(WORK / (time.perf_counter() - started))))
    dist.broadcast(rounds, 0)
    return int(rounds)


def timed(rounds: int) -> float:
    started = time.perf_counter()
    for _ in range(rounds):
        work()
    return time.perf_counter() - started


def work() -> None:
    """Like a layer: a matrix product, and an operation that only moves memory."""
    x = torch.ones(128, 256) @ torch.ones(256, 1024)
    torch.nn.functional.silu(x).sum()
