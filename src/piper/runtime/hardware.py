"""Where a process computes: on a GPU of its own, on its share of one, or on the CPU."""

from __future__ import annotations

import os

import torch

from piper.errors import InputError, Problem

KINDS = ("cpu", "cuda")


def chosen_device(wanted: str | None = None) -> torch.device:
    """What the user says, or PIPER_DEVICE; otherwise a GPU where there is one.

    A kernel that is loaded at its first use waits for the whole device, and so for messages that
    are on their way to it: all are loaded at the start.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    name = wanted or os.environ.get("PIPER_DEVICE") or best()
    if name not in KINDS:
        raise InputError("device", Problem(f"{name!r} is no device", 'write "cuda" or "cpu"'))
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = Problem("there is no GPU that torch can use", 'write device="cpu"')
        raise InputError("device", problem)
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def peak_gib(device: torch.device) -> float:
    """The most memory that this process had, on its GPU or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
