"""Wait until all processes of a run are there, and say which one is missing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

from piper.errors import PeerLost
from piper.runtime.processes.store import FILE

OFTEN = 0.02  # seconds between two looks
WHAT = "the start of the run"


def wait_for_all(store: dist.Store, rank: int, world: int, seconds: float) -> None:
    """Wait for the other processes to make their Trainer too."""
    store.set(arrival(rank), "")
    end = time.monotonic() + seconds
    missing = [one for one in range(world) if one != rank]
    while missing := [one for one in missing if not store.check([arrival(one)])]:
        if over := [one for one in missing if has_ended(one)]:
            reason = f"device {over[0]} reached the end of its script and made no Trainer"
            raise PeerLost(rank, WHAT, reason, over[0])
        if time.monotonic() > end:
            reason = f"device {missing[0]} has made no Trainer in {seconds:.0f} s"
            raise PeerLost(rank, WHAT, reason, missing[0])
        time.sleep(OFTEN)


def arrival(rank: int) -> str:
    return f"piper/{rank} is here"


def has_ended(rank: int) -> bool:
    """Whether the launcher saw the end of a process. It writes a file beside the store."""
    path = os.environ.get(FILE)
    return path is not None and Path(path).with_name(f"ended-{rank}").exists()
