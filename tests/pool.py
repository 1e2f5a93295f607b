"""A pool of worker processes kept alive between tests: torch is imported once, not per test."""

from __future__ import annotations

import atexit
import importlib
import io
import multiprocessing as mp
import os
import threading
import traceback
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

HOST = "127.0.0.1"
LARGEST = 4  # processes
HEAVY = [
    "torch", "torch.distributed", "torch._functorch.aot_autograd", "piper.trainer",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip
_pool: list[tuple[Any, Connection]] = []
_jobs = count()
_growing = threading.Lock()


def run_on(world: int, job: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run `job(rank, *args)` on this many processes, joined by gloo. Returns the results by rank.

    The job is named by module and function, so that workers import it themselves.
    """
    grow(world)
    port, number = meeting_place().port, next(_jobs)
    for rank in range(world):
        _pool[rank][1].send((job.__module__, job.__name__, rank, world, port, number, args))
    return [receive(rank, timeout) for rank in range(world)]


@cache
def meeting_place() -> Any:
    """The store where processes find each other: one for all jobs, each with its own prefix.

    Not files: processes look at these every now and then, and they meet very often.
    """
    from torch.distributed import TCPStore

    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def receive(rank: int, timeout: float) -> Any:
    process, pipe = _pool[rank]
    if not pipe.poll(timeout):
        close()
        raise TimeoutError(f"worker {rank} gave no answer in {timeout} s")
    good, result = pipe.recv()
    if not good:
        close()
        raise AssertionError(f"worker {rank} failed:\n{result}")
    return unpacked(result)


def grow(world: int) -> None:
    """Workers are forked from a process that has imported what takes seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    with _growing:
        while len(_pool) < world:
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            _pool.append((process, mine))


def start_early() -> None:
    """Start workers while other tests run."""
    threading.Thread(target=grow, args=(LARGEST,), daemon=True).start()


def close() -> None:
    """Stop all workers, by force if they hang. The next test starts new ones."""
    for _, pipe in _pool:
        pipe.close()
    while _pool:
        process, _ = _pool.pop()
        process.join(2)
        process.kill()
        process.join()


atexit.register(close)


def packed(result: Any) -> bytes:
    """As one piece: by themselves, tensors go as files that two processes share, one by one."""
    import torch

    file = io.BytesIO()
    torch.save(result, file)
    return file.getvalue()


def unpacked(result: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(result), weights_only=False)


def serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for module, name, rank, world, port, number, args in iter(partial(asked, pipe), None):
        try:
            pipe.send((True, packed(joined(module, name, rank, world, port, number, args))))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def asked(pipe: Connection) -> Any:
    """The next job; None when the tests are over."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def joined(module: str, name: str, rank: int, world: int, port: int, number: int, args: Any) -> Any:
    import torch.distributed as dist

    job = getattr(importlib.import_module(module), name)
    store = dist.PrefixStore(f"job {number}", dist.TCPStore(HOST, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        return job(rank, *args)
    finally:
        dist.destroy_process_group()
