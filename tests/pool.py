"""A pool of worker processes kept alive between tests: torch is imported once, not per test."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_pool: list[tuple[Any, Connection]] = []


def run_on(world: int, job: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`job(rank, *args)` on so many processes joined by gloo; the results, by rank.

    The job is named by module and function, so that workers import it themselves.
    """
    grow(world)
    with tempfile.TemporaryDirectory(prefix="piper-", ignore_cleanup_errors=True) as folder:
        store = os.path.join(folder, "store")
        for rank in range(world):
            _pool[rank][1].send((job.__module__, job.__name__, rank, world, store, args))
        return [receive(rank, timeout) for rank in range(world)]


def receive(rank: int, timeout: float) -> Any:
    process, pipe = _pool[rank]
    if not pipe.poll(timeout):
        close()
        raise TimeoutError(f"worker {rank} gave no answer in {timeout} s")
    good, result = pipe.recv()
    if not good:
        close()
        raise AssertionError(f"worker {rank} failed:\n{result}")
    return result


def grow(world: int) -> None:
    context = mp.get_context("spawn")
    while len(_pool) < world:
        mine, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        _pool.append((process, mine))


def close() -> None:
    """End all workers; the next test starts new ones."""
    while _pool:
        process, _ = _pool.pop()
        process.kill()
        process.join()


atexit.register(close)


def serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        module, name, rank, world, store, args = pipe.recv()
        try:
            pipe.send((True, joined(module, name, rank, world, store, args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def joined(module: str, name: str, rank: int, world: int, store: str, args: Any) -> Any:
    import torch.distributed as dist

    job = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        return job(rank, *args)
    finally:
        dist.destroy_process_group()
