"""Find the device that the others wait for, step after step, and where it loses its time.

All processes learn the times of all before each step, with what they agree on anyway. So all come
to the same result. When one device is slow, they note how long their instructions take in a few
steps, and compare.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, median

import torch

from piper.job.processes.consistency import DeviceTimes
from piper.runtime.comm.stream_shares import on_compute_stream
from piper.runtime.execute import Program
from piper.runtime.metrics import BETWEEN, Slowest
from piper.runtime.observe.gpu_time import GpuTime
from piper.runtime.observe.own_time import OwnTime, Seconds
from piper.runtime.processes.gathering import everyone

LOG = logging.getLogger("piper")
WINDOW = 20  # steps that are compared
MOSTLY = 0.8  # of them: chance may make any device slow in some
FACTOR = 1.25  # times the work of the others
LEAST = 2e-3  # seconds: less is Python's own noise
LOOK = 3  # steps in which instructions are timed
SOON = 1e-9  # seconds
Row = Sequence[DeviceTimes]  # for each device
Rows = Sequence[Row]  # for each step


class Stragglers:
    """What this process knows of the times of all."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.own: OwnTime | GpuTime = GpuTime() if device.type == "cuda" else OwnTime()
        self.rows: deque[tuple[DeviceTimes, ...]] = deque(maxlen=WINDOW)
        self.usual: list[float] = []  # the work of each device in units of the others, at first
        self.found: Slowest | None = None
        self.looks = 0  # steps that are still to be timed
        self.seconds: Seconds = {}
        self.told = ""

    def mine(self, role: int) -> DeviceTimes:
        """What the others should know."""
        return (*self.own.taken(), role)

    def see(self, devices: tuple[DeviceTimes, ...]) -> None:
        """Before a step, with the times of the last one."""
        if devices and all(inside for inside, *_ in devices):  # they did take a step
            self.rows.append(devices)
        if self.found is not None and self.looks == 0 and not self.found.where and self.rows:
            self.explain(self.found)
        elif self.looks == 0 and len(self.rows) == WINDOW:
            self.compare()
        self.own.begin()

    def compare(self) -> None:
        """After so many steps."""
        if not self.usual:
            self.usual = ratios(typical(self.rows))
        self.found, again = straggler(self.rows, self.usual), self.found
        if self.found is not None and again is not None and again.device == self.found.device:
            self.found = replace(self.found, where=again.where, lost=again.lost)
        elif self.found is not None:
            self.looks = LOOK
        self.rows.clear()

    @contextmanager
    def stepping(self, program: Program) -> Iterator[None]:
        """Around a step, on its stream."""
        look = self.looks > 0
        self.looks -= look
        with (
            on_compute_stream(program.plan, program.device),
            self.own.stepping(program, look) as seconds,
        ):
            yield
        for what, one in seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + one / LOOK

    def explain(self, found: Slowest) -> None:
        """Where the slow device loses its time. All processes send what they noted."""
        seconds, self.seconds = self.seconds, {}
        everywhere = everyone(seconds, "the times of instructions")
        between = [mean(row[k][1] for row in self.rows) for k in range(len(everywhere))]
        noted = [{**one, BETWEEN: spent} for one, spent in zip(everywhere, between, strict=True)]
        where, lost = most_lost(noted, found.device, peers_of(self.rows[-1], found.device))
        lost = min(lost, found.seconds - found.others)  # devices may join different instructions
        self.found = replace(found, where=where, lost=lost)
        if self.rank == 0 and self.told != (told := f"{found.device} {where}"):
            self.told = told
            LOG.warning("%s", self.found)


def straggler(rows: Rows, usual: Sequence[float]) -> Slowest | None:
    """The device that works longest, if it does so in nearly all steps.

    Devices with the same plan should take the same time. If no other device has its plan, a device
    is compared with all others, and with how it compared at first (`usual`).
    """
    row = typical(rows)
    alone = {role for role, group in groups(row).items() if len(group) == 1}
    most = [FACTOR * (usual[k] if role in alone else 1.0) for k, (*_, role) in enumerate(row)]
    compared = ratios(row)
    device = max(range(len(row)), key=lambda k: compared[k] / most[k])
    if compared[device] < most[device]:
        return None
    slow = sum(ratios(one)[device] > most[device] for one in rows)
    own, others = work(row[device]), references(row)[device]
    if slow < MOSTLY * len(rows) or own - others < LEAST:
        return None
    return Slowest(device, own, others)


def typical(rows: Rows) -> Row:
    """The median of each device's work."""
    devices = zip(*rows, strict=True)
    return [(median(map(work, one)), 0.0, one[0][2]) for one in devices]


def ratios(row: Row) -> list[float]:
    """The work of each device in one step, in units of that of its peers."""
    pairs = zip(map(work, row), references(row), strict=True)
    return [own / max(others, SOON) for own, others in pairs]


def references(row: Row) -> list[float]:
    """The work of each device's peers in one step: their median, or that of the only other one.

    A device alone with its plan is compared with all others. Linear in the number of devices.
    """
    of_all = middle([*map(work, row)])
    of_role = {role: middle([work(row[k]) for k in group]) for role, group in groups(row).items()}
    sizes = {role: len(group) for role, group in groups(row).items()}
    found = [of_role[role] if sizes[role] > 1 else of_all for *_, role in row]
    return [(low if work(one) > low else high) if low != high else low
            for one, (low, high) in zip(row, found, strict=True)]  # fmt: skip


def middle(several: Sequence[float]) -> tuple[float, float]:
    """The median, twice; or of two, both: each is compared with the other."""
    if len(several) == 2:
        return min(several), max(several)
    return median(several), median(several)


def groups(row: Row) -> dict[int, list[int]]:
    """The devices of each role."""
    found: dict[int, list[int]] = {}
    for device, (*_, role) in enumerate(row):
        found.setdefault(role, []).append(device)
    return found


def work(times: DeviceTimes) -> float:
    return times[0] + times[1]


def peers_of(row: Row, device: int) -> list[int]:
    """The other devices with the same plan, or all others if there is none."""
    same = groups(row)[row[device][2]]
    peers = same if len(same) > 1 else range(len(row))
    return [one for one in peers if one != device]


def most_lost(noted: Sequence[Seconds], device: int, peers: Sequence[int]) -> tuple[str, float]:
    """What takes the device longer than its peers, and by how much.

    >>> most_lost([{"PP0:F": 3.0, "PP0:B": 5.0}, {"PP0:F": 1.0, "PP0:B": 4.0}], 0, [1])
    ('PP0:F', 2.0)
    """
    more = {
        what: own - median(noted[k].get(what, 0.0) for k in peers)
        for what, own in noted[device].items()
    }
    where = max(more, key=more.__getitem__)
    return where, more[where]
