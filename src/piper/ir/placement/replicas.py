"""Replicas of the model, and feeds: replicas that share devices get one batch together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm

from piper.ir.placement.devices import Devices
from piper.names import Device

Rows = tuple[tuple[Device, ...], ...]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that share a device make one feed: in mirrored lists (as in DualPipe), or where a
    region has fewer devices than another.

    All feeds have equally many replicas, so some have replicas that share no device.

    Replicas that divide regions among them make a team. A team gets one batch, and all its members
    work on the same part of it.
    """

    lists: Rows
    feeds: tuple[tuple[int, ...], ...]
    teams: tuple[tuple[int, ...], ...]  # all replicas; most are alone
    parts: int  # in how many a feed cuts its batch: one for each of its teams

    @property
    def devices(self) -> set[Device]:
        return {device for row in self.lists for device in row}

    @property
    def ways(self) -> int:
        """How many replicas a team has."""
        return len(self.teams[0])

    def feed(self, device: Device) -> int:
        """Which batch a device gets."""
        replica = next(row.index(device) for row in self.lists if device in row)
        return next(k for k, feed in enumerate(self.feeds) if replica in feed)

    def place(self, devices: Sequence[Device], device: Device) -> tuple[int, int]:
        """The part of its feed's batch that a device computes for a region, of how many.

        >>> mirrored = replicas([(0, 1), (1, 0)])
        >>> mirrored.place((0, 1), 0), mirrored.place((1, 0), 0)
        ((0, 2), (1, 2))
        >>> replicas([(0, 1)], [(0, 1)]).place((0, 1), 1)
        (0, 1)
        """
        replica = devices.index(device)
        feed = next(feed for feed in self.feeds if replica in feed)
        if len(feed) == 1:
            return 0, 1
        parts = self.fed(feed)
        return next(k for k, team in enumerate(parts) if replica in team), len(parts)

    def fed(self, feed: Sequence[int]) -> list[tuple[int, ...]]:
        """The teams of a feed: each computes a part of its batch."""
        return [team for team in self.teams if team[0] in feed]

    def groups(self, devices: Sequence[Device]) -> Rows:
        """The teams of a region on `devices`."""
        return tuple(tuple(devices[k] for k in team if k < len(devices)) for team in self.teams)


def replicas(
    lists: Iterable[Sequence[Device]], divided: Iterable[Sequence[Device]] = ()
) -> Replicas:
    """The replicas and feeds of regions with these device lists.

    `divided` are the groups of devices that divide regions.
    """
    groups = tuple(dict.fromkeys(map(tuple, divided)))
    every = dict.fromkeys(map(as_devices, lists)) or (Devices((0,)),)
    known = tuple(stretched(every, team_size(groups)).values())
    count, together = len(known[0]), list(positions(known, groups))
    feeds = tuple(equally_many(joined(count, [*shared(known), *together])))
    teams = joined(count, together)
    return Replicas(known, feeds, teams, sum(team[0] in feeds[0] for team in teams))


def shared(lists: Rows) -> Iterator[tuple[int, int]]:
    """Replicas that have a device in common."""
    first: dict[Device, int] = {}
    for row in lists:
        for replica, device in enumerate(row):
            yield first.setdefault(device, replica), replica


def positions(lists: Rows, groups: Rows) -> Iterator[tuple[int, int]]:
    """Replicas that divide regions among them.

    >>> list(positions(((0, 1, 0, 1),), ((0, 1),)))
    [(0, 1), (2, 3)]
    """
    for row in lists if groups else ():
        places: dict[Device, list[int]] = {}
        for replica, device in enumerate(row):
            places.setdefault(device, []).append(replica)
        for group in groups:
            if all(device in places for device in group):
                first, *others = (places[device] for device in group)
                yield from chain.from_iterable(zip(first, one, strict=False) for one in others)


def team_size(groups: Rows) -> int:
    """How many devices divide a region together, where groups are rows and columns of a grid.

    >>> team_size(((0, 1), (2, 3))), team_size(((0, 1), (2, 3), (0, 2), (1, 3)))
    (2, 4)
    """
    number = {device: k for k, device in enumerate(dict.fromkeys(chain.from_iterable(groups)))}
    pairs = ((number[group[0]], number[device]) for group in groups for device in group)
    return max(map(len, joined(len(number), pairs)), default=1)


def joined(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Numbers below `count`, those that pairs connect together."""
    root = list(range(count))

    def find(replica: int) -> int:
        while root[replica] != replica:
            replica = root[replica]
        return replica

    for one, other in pairs:
        a, b = sorted((find(one), find(other)))
        root[b] = a
    found: dict[int, list[int]] = {}
    for replica in range(count):
        found.setdefault(find(replica), []).append(replica)
    return tuple(map(tuple, found.values()))


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


def stretched(lists: Iterable[Devices], team: int = 1) -> dict[Devices, Devices]:
    """Each list, as long as all others: where it is shorter, each device has several replicas.

    Devices that divide regions, `team` of them, stay side by side.

    >>> stretched([Devices((0, 2)), Devices((1,))])
    {(0, 2): (0, 2), (1,): (1, 1)}
    >>> stretched([Devices((0, 1)), Devices((2, 3, 4, 5))], team=2)
    {(0, 1): (0, 1, 0, 1), (2, 3, 4, 5): (2, 3, 4, 5)}
    """
    known = tuple(lists)
    count = lcm(*map(len, known))
    return {
        short: short if len(short) == count
        else Devices(repeated(short, 1 if len(short) % team else team, count // len(short)))
        for short in known
    }  # fmt: skip


def repeated(devices: Devices, size: int, times: int) -> Iterator[Device]:
    """Each `size` devices, so many times."""
    for k in range(0, len(devices), size):
        yield from devices[k : k + size] * times


def distinct(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Each device once, however many replicas it has.

    >>> distinct((0, 0, 2))
    (0, 2)
    """
    if len(devices) == 1:
        return devices
    return as_devices(devices).distinct
