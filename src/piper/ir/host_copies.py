"""What waits in host memory between two uses, and how it gets there and back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Offloaded(StrEnum):
    """What `Offload` moves to host memory."""

    ACTIVATIONS = "activations"  # what a region keeps from its forward to its backward
    OPTIMIZER = "optimizer"  # optimizer state and masters, from one update to the next
    PARAMETERS = "parameters"  # what passes compute with, from one use to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """How something is copied to the host and back."""

    stream: str
    ahead: int  # by how many passes a copy to the device starts before its use
    buffers: int  # for how many passes a device holds copies at once, in each direction
