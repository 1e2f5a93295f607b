"""How the replicas of a bucket share its parameters, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from piper.names import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """What `Replicate` asks for. Devices of a group shard among themselves, groups replicate."""

    groups: tuple[tuple[Device, ...], ...]
    zero: int = 0  # what is sharded: 0 nothing, 1 optimizer, 2 gradients too, 3 parameters too
    message_bytes: int
    reduce_stream: str
    gather_stream: str
    gather_ahead: int
    gather_buffers: int
    once: bool  # gradients are reduced once per step, not as each microbatch produces them
    holds_more: bool = False  # than so many buffers where that does not raise the peak
    shares: int = 1  # of experts; the groups of one share are consecutive

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(chain.from_iterable(self.groups))

    @property
    def ways(self) -> int:
        """The number of shards; 1 if nothing is sharded."""
        return len(self.groups[0]) if self.zero else 1

    @property
    def sharded(self) -> bool:
        return self.ways > 1

    @property
    def across(self) -> tuple[tuple[Device, ...], ...]:
        """Devices that hold the same state: all of them, or those with the same shard."""
        size = len(self.groups) // self.shares
        each = [self.groups[k : k + size] for k in range(0, len(self.groups), size)]
        if self.sharded:
            rows = [row for groups in each for row in zip(*groups, strict=True)]
        else:
            rows = [tuple(chain.from_iterable(groups)) for groups in each]
        return tuple(tuple(sorted(row)) for row in rows)
