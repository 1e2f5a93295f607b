"""Where a process computes: on a GPU of its own, on its share of one, or on the CPU."""

from __future__ import annotations

import os

import torch

from piper.errors import InputError, Problem

KINDS = ("cpu", "cuda")
SHARED = "PIPER_SHARE_GPU"  # set where several processes are to use one GPU


def chosen_device(wanted: str | None = None) -> torch.device:
    """What the user says, or PIPER_DEVICE; otherwise a GPU where there is one.

    A kernel that is loaded at its first use waits for the whole device, and so for messages that
    are on their way to it: all are loaded at the start.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    queues = "16" if SHARED in os.environ else "32"  # more would be too many for several processes
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    name = wanted or os.environ.get("PIPER_DEVICE") or best()
    if name not in KINDS:
        raise InputError("device", Problem(f"{name!r} is no device", 'write "cuda" or "cpu"'))
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = Problem("there is no GPU that torch can use", 'write device="cpu"')
        raise InputError("device", problem)
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count and SHARED not in os.environ:
        what = f"process {index} of this host has no GPU of its own: there are {count}"
        fix = 'start fewer, share one GPU with `piper run --share-gpu`, or write device="cpu"'
        raise InputError("device", Problem(what, fix))
    torch.cuda.set_device(index % count)
    return torch.device("cuda", index % count)


def best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def peak_gib(device: torch.device) -> float:
    """The most memory that this process had, on its GPU or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
