"""A bounded number of buffers on a lane, and what to evict. The bound may change from pass to pass.

The order of all uses is known, so the best buffer can be evicted: the one whose next use is the
latest (Belady's rule).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from piper.names import BucketId


@dataclass
class BufferSlots:
    """Buffers that hold one bucket each."""

    size: int
    ahead: int  # by how many passes a buffer is filled before its use
    needs: Sequence[Sequence[BucketId]]  # the buckets that each pass of the lane uses
    inside: dict[BucketId, int] = field(default_factory=dict)  # the slot of a bucket
    limits: Sequence[int] = ()  # how many buffers may be in use in each pass; empty: all

    def __post_init__(self) -> None:
        self.free_from = [0] * self.size  # by slot: the position from which it is free
        self.uses: dict[BucketId, list[int]] = {}
        for position, buckets in enumerate(self.needs):
            for bucket in buckets:
                self.uses.setdefault(bucket, []).append(position)

    def take(self, position: int, bucket: BucketId, keep: Container[BucketId]) -> int | None:
        """The slot that holds a bucket from now on. None: all hold what must be kept.

        It is a free one, or that of the bucket whose next use is the latest. A buffer that is idle
        early enough is better, because it can be filled ahead.
        """
        most = min(self.limits[max(0, position - self.ahead) : position + 1], default=self.size)
        given_up = self.evict(position, most - 1, keep)
        if len(self.inside) >= most:
            return None
        taken = set(self.inside.values())
        unused = (slot for slot in range(self.size) if slot not in taken)
        # Of those given up, the last that is free: until then, all others may be in use.
        free = max(given_up, key=self.free_from.__getitem__) if given_up else next(unused)
        self.inside[bucket] = free
        return free

    def evict(self, position: int, most: int, keep: Container[BucketId]) -> list[int]:
        """Give up buffers until at most so many are in use, if what must be kept allows it."""
        given_up: list[int] = []
        while len(self.inside) > most:
            idle = [one for one in self.inside if one not in keep]
            if not idle:
                break
            given_up.append(self.inside.pop(self.victim(position, idle)))
        return given_up

    def victim(self, position: int, idle: Sequence[BucketId]) -> BucketId:
        ready = [one for one in idle if self.free_from[self.inside[one]] <= position - self.ahead]
        return max(ready or idle, key=lambda bucket: self.next_use(bucket, position))

    def start(self, position: int, slot: int) -> int:
        """Before which pass to start filling a slot for this position."""
        return max(position - self.ahead, self.free_from[slot], 0)

    def next_use(self, bucket: BucketId, position: int) -> int:
        """The first use after a position."""
        uses = self.uses[bucket]
        k = bisect_right(uses, position)
        return uses[k] if k < len(uses) else len(self.needs)
