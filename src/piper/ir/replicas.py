"""Replicas of the model, and feeds: replicas that share devices get one batch together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piper.names import Device


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that share a device (mirrored lists, as in DualPipe) make one feed."""

    lists: tuple[tuple[Device, ...], ...]
    feeds: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> set[Device]:
        return {device for row in self.lists for device in row}

    def feed(self, device: Device) -> int:
        """Which batch a device gets."""
        replica = next(row.index(device) for row in self.lists if device in row)
        return next(k for k, feed in enumerate(self.feeds) if replica in feed)

    def place(self, devices: Sequence[Device], device: Device) -> tuple[int, int]:
        """The part of its feed's batch that a device computes for a region, of how many.

        >>> mirrored = replicas([(0, 1), (1, 0)])
        >>> mirrored.place((0, 1), 0), mirrored.place((1, 0), 0)
        ((0, 2), (1, 2))
        """
        replica = devices.index(device)
        feed = next(feed for feed in self.feeds if replica in feed)
        return feed.index(replica), len(feed)


def replicas(lists: Iterable[Sequence[Device]]) -> Replicas:
    """The replicas and feeds of regions with these device lists."""
    known = tuple(dict.fromkeys(map(tuple, lists))) or ((0,),)
    root = list(range(max(map(len, known))))

    def find(replica: int) -> int:
        while root[replica] != replica:
            replica = root[replica]
        return replica

    first: dict[Device, int] = {}
    for row in known:
        for replica, device in enumerate(row):
            a, b = sorted((find(first.setdefault(device, replica)), find(replica)))
            root[b] = a
    feeds: dict[int, list[int]] = {}
    for replica in range(len(root)):
        feeds.setdefault(find(replica), []).append(replica)
    return Replicas(known, tuple(map(tuple, feeds.values())))
