"""Replicas of the model, and feeds: replicas that share devices get one batch together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from piper.ir.devices import Devices
from piper.names import Device


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that share a device make one feed: in mirrored lists (as in DualPipe), or where a
    region has fewer devices than another.

    All feeds have equally many replicas, so some have replicas that share no device.
    """

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
    known = tuple(stretched(dict.fromkeys(map(as_devices, lists)) or (Devices((0,)),)).values())
    root = list(range(len(known[0])))

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
    return Replicas(known, tuple(equally_many(tuple(map(tuple, feeds.values())))))


def equally_many(feeds: tuple[tuple[int, ...], ...]) -> Iterable[tuple[int, ...]]:
    """Feeds with equally many replicas: where they differ, the shortest runs that keep them whole.

    >>> list(equally_many(((0, 1), (2,), (3, 4), (5,))))
    [(0, 1, 2), (3, 4, 5)]
    """
    if len(set(map(len, feeds))) == 1:
        return feeds
    count = sum(map(len, feeds))
    sizes = (size for size in range(1, count + 1) if not count % size)
    size = next(s for s in sizes if all(feed[0] // s == feed[-1] // s for feed in feeds))
    return (tuple(range(k, k + size)) for k in range(0, count, size))


def as_devices(row: Sequence[Device]) -> Devices:
    return row if isinstance(row, Devices) else Devices(row)


def stretched(lists: Iterable[Devices]) -> dict[Devices, Devices]:
    """Each list, as long as all others: where it is shorter, each device has several replicas.

    >>> stretched([Devices((0, 2)), Devices((1,))])
    {(0, 2): (0, 2), (1,): (1, 1)}
    """
    known = tuple(lists)
    count = lcm(*map(len, known))
    return {
        short: short if len(short) == count
        else Devices(device for device in short for _ in range(count // len(short)))
        for short in known
    }  # fmt: skip


def distinct(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Each device once, however many replicas it has.

    >>> distinct((0, 0, 2))
    (0, 2)
    """
    if len(devices) == 1:
        return devices
    return as_devices(devices).distinct
