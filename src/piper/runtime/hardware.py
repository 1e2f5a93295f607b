"""The device of a process: its own GPU, a share of one, or the CPU."""

from __future__ import annotations

import os
import warnings

import torch

from piper.errors import InputError, Problem

KINDS = ("cpu", "cuda")
NO_BF16 = "mkldnn_matmul failed, switching to BLAS"  # torch, on a CPU without bf16 instructions
SHARED = "PIPER_SHARE_GPU"  # set if several processes share one GPU


def chosen_device(wanted: str | torch.device | None = None) -> torch.device:
    """The device that the user or PIPER_DEVICE names, or else a GPU if there is one.

    Loading a kernel at its first use would wait for the whole device, and so for messages in
    flight. All kernels are loaded at the start instead.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    queues = "16" if SHARED in os.environ else "32"  # 32 is too many for several processes
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    given = str(wanted) if isinstance(wanted, torch.device) else wanted
    name = os.environ.get("PIPER_DEVICE") or best() if given is None else given
    if name not in KINDS:
        own = "; each process has a GPU of its own" if "cuda" in str(name) else ""
        raise InputError.of("device", f"{name!r} is not a device", f'write "cuda" or "cpu"{own}')
    if name == "cpu":
        warnings.filterwarnings("ignore", NO_BF16)  # pages of C++ frames; the numbers are the same
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = Problem("there is no GPU that torch can use", 'write device="cpu"')
        raise InputError("device", problem)
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count and SHARED not in os.environ:
        what = f"process {index} of this host has no GPU of its own: the host has {count}"
        fix = 'share one GPU with `piper run --share-gpu`, use fewer processes, or device="cpu"'
        raise InputError.of("device", what, fix)
    chosen = 0 if SHARED in os.environ else index  # all share the first one that is visible
    torch.cuda.set_device(chosen)
    return torch.device("cuda", chosen)


def best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_memory(device: torch.device) -> int | None:
    """Bytes that this process has on its GPU: all of them, or an equal part if it is shared."""
    if device.type != "cuda":
        return None
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if SHARED in os.environ else 1
    return int(torch.cuda.get_device_properties(device).total_memory) // processes


def peak_gib(device: torch.device) -> float:
    """The peak memory of this process, on its GPU or on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
