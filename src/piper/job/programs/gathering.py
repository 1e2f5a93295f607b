"""What replicas have, on device 0: a metric of the user's own needs all labels, or all counts."""

from __future__ import annotations

from typing import Any

from piper.errors import InputError
from piper.job.job import Job
from piper.runtime.processes.gathering import gather
from piper.runtime.processes.wire_format import from_bytes, to_bytes

FIX = "give tensors, numbers and text, or lists, tuples and dicts of them"


def gathered(mine: Any, rank: int, job: Job) -> list[Any] | None:
    """The value of each replica, in their order, on device 0. The others get None."""
    try:
        own = from_bytes(to_bytes(mine))  # also of one process: on the CPU, as from others
    except TypeError as error:
        raise InputError.of("gather", str(error), FIX) from None
    feeds = job.feeds
    replica = feeds.feed(rank)
    first = min(device for device in feeds.devices if feeds.feed(device) == replica)
    everywhere = gather({replica: own} if rank == first else {})
    if everywhere is None:
        return None
    found = {number: one for parts in everywhere for number, one in parts.items()}
    return [found[number] for number in range(job.replicas)]
