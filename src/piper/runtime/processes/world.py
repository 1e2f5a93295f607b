"""The processes that train together."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from piper.errors import StrategyError
from piper.names import amount
from piper.runtime.processes.arrivals import wait_for_all
from piper.runtime.processes.store import open_store, second_connection
from piper.runtime.processes.waits import open_board

_patience = timedelta(minutes=10)  # what the last Trainer was given


def join(timeout: float, on_gpu: bool = False) -> int:
    """Join the other processes, if there are any. Returns the rank, which is the device."""
    global _patience
    _patience = timedelta(seconds=timeout)
    if not dist.is_initialized() and processes() > 1:
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        # NCCL connects when a group is made, not during a step.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = open_store(_patience)
        wait_for_all(store, rank, size, timeout)
        dist.init_process_group(backend, store=store, timeout=_patience, rank=rank, world_size=size)
        open_board(second_connection(), rank, size, _patience)
    return dist.get_rank() if dist.is_initialized() else 0


def patience() -> timedelta:
    """How long to wait for another process. torch's own default is half an hour."""
    return _patience


def processes() -> int:
    """How many processes the launcher started, also before they have joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def refuse_wrong_world(devices: tuple[int, ...]) -> None:
    if devices != tuple(range(world())):
        count, processes = max(devices) + 1, amount(world(), "process", "processes")
        numbered = devices == tuple(range(count))
        more = "" if numbered else f", and use all devices from 0 to {count - 1}"
        raise StrategyError.of(
            "strategy",
            f"it uses devices {list(devices)}, but the run has {processes}",
            f"start it with `piper run SCRIPT -n {count}`, or in a notebook with "
            f"piper.launch(fn, {count}){more}",
        )
