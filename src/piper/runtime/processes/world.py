"""The processes that train together."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from shlex import quote
from typing import Protocol

import torch.distributed as dist

from piper.errors import InputError, StrategyError, some_names
from piper.names import amount
from piper.runtime.processes.arrivals import wait_for_all
from piper.runtime.processes.store import open_store, second_connection
from piper.runtime.processes.waits import open_board

LAUNCHED = "PIPER_LAUNCHED"  # set by `piper.launch`: the call, with {n} for the processes
_patience = timedelta(minutes=10)  # what the last Trainer was given
_open: weakref.WeakValueDictionary[int, Groups] = weakref.WeakValueDictionary()  # by id


def join(timeout: float, on_gpu: bool = False) -> int:
    """Join the other processes, if there are any. Returns the rank, which is the device."""
    global _patience
    if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise InputError.of("timeout", f"{timeout!r} is no number of seconds", "write timeout=600")
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
        if not on_gpu:
            atexit.register(leave)
    return dist.get_rank() if dist.is_initialized() else 0


class Groups(Protocol):
    """What has process groups."""

    def close(self) -> None: ...


def closed_at_exit(one: Groups) -> None:
    """Groups end with the last reference to them."""
    _open[id(one)] = one


def leave() -> None:
    """End the threads of gloo where a script ends: a tensor that one of them frees when Python is
    gone aborts the process. After an error, messages may be left that they would wait for."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        for one in list(_open.values()):
            one.close()
        dist.destroy_process_group()


def patience() -> timedelta:
    """How long to wait for another process. torch's own default is half an hour."""
    return _patience


def processes() -> int:
    """How many processes the launcher started, also before they have joined."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def refuse_gaps(devices: tuple[int, ...]) -> None:
    """Every device is a process of the run, so none may be left out.

    `devices`: those that a strategy names. If none, its regions have none, which is an error.
    """
    unused = [device for device in range(max(devices, default=0)) if device not in devices]
    if unused:
        several, last = len(unused) > 1, len(devices) - 1
        names = f"device{'s' * several} {some_names(list(map(str, unused)))}"
        numbers = f"number devices 0 to {last}" if last else "number devices from 0"
        what = f"it uses devices {list(devices)}: {names} {'are' if several else 'is'} not used"
        raise StrategyError.of("strategy", what, f"{numbers}, or place regions on {names} too")


def refuse_wrong_world(devices: tuple[int, ...]) -> None:
    """`devices`: as for `refuse_gaps`."""
    refuse_gaps(devices)
    if devices and devices != tuple(range(world())):
        raise StrategyError.of(
            "strategy",
            f"it uses devices {list(devices)}, but the run has "
            f"{amount(world(), 'process', 'processes')}",
            other_world(devices),
        )


def other_world(devices: tuple[int, ...]) -> str:
    """What to write for these devices."""
    count = max(devices) + 1
    fix = how_to_start(count)
    return fix if count > world() else f"{fix}; or place regions on the other devices, too"


def how_to_start(count: int) -> str:
    """With so many processes."""
    if launched := os.environ.get(LAUNCHED):
        return f"write `{launched.format(n=count)}`"
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.name != "ipykernel_launcher.py":
        own = " ".join([f"{script.name} -n {count}", *map(quote, sys.argv[1:])])
        return f"start it with `piper run {own}`"
    notebook = f"in a notebook with piper.launch(fn, {count})"
    return f"start it with `piper run SCRIPT -n {count}`, or {notebook}"
