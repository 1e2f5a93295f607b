"""Run the plans of all devices together on a clock.

A host that blocks (CPU) does one instruction after the other and waits where they say so; messages
go on by themselves. A host that runs ahead (GPU) only queues: each stream goes on in order as soon
as what it waits for has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from piper.costs.costs import Host
from piper.costs.links import Network
from piper.names import COMPUTE, Device
from piper.plan.analyse.trace import SIMULATED, Span, Trace
from piper.plan.instructions import (
    Instruction,
    Plan,
    Send,
    Total,
)
from piper.plan.meeting import Meeting
from piper.plan.rendezvous import Rendezvous
from piper.sim.events import START, Event, Line
from piper.sim.sharing import Demand, Sharing
from piper.sim.wiring import FAST, Alike, Wiring, alone

Price = Callable[[Instruction], float]  # seconds that an instruction takes on its device
Act = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A step on the clock, and what each thing had to wait for last."""

    trace: Trace
    plans: tuple[Plan, ...]
    causes: tuple[Sequence[Event], ...]  # for each plan: what ended when this began
    seconds: float


def simulate(
    plans: Sequence[Plan],
    price: Price,
    network: Network | None = None,
    host: Host | None = None,
    name: str = "simulated",
    alike: Alike = alone,
) -> Simulated:
    """When everything happens.

    Members of a group that have no plan here come when the others do; `alike` says how many devices
    do the same as one that is here.
    """
    clock = Clock(tuple(plans), price, network or Network(), host or Host(), alike)
    clock.run()
    spans = {
        plan.device: tuple(map(Span, range(len(plan.instructions)), issued, start, end))
        for plan, issued, start, end in zip(
            plans, clock.issued, clock.start, clock.end, strict=True
        )
    }
    trace = Trace(name, SIMULATED, spans)
    return Simulated(trace, tuple(plans), tuple(clock.causes), trace.seconds)


@dataclass
class Lane:
    """What runs in order: all of a device's plan when its host blocks, else one of its streams."""

    row: int  # whose plan
    positions: Sequence[int]
    at: int = 0
    issued: float | None = None
    last: Event = START  # what it did before


@dataclass
class Clock:
    """All devices, and what is under way."""

    plans: tuple[Plan, ...]
    price: Price
    network: Network
    host: Host
    alike: Alike
    now: float = 0.0
    timers: list[tuple[float, int, Act]] = field(default_factory=list)
    sharing: Sharing = field(default_factory=Sharing)
    acts: dict[int, Act] = field(default_factory=dict)  # what to do when something shared ends
    asleep: dict[Event, list[Lane]] = field(default_factory=dict)
    woken: deque[Lane] = field(default_factory=deque)
    count: int = 0
    needed: dict[object, tuple[float, tuple[Demand, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [len(plan.instructions) for plan in self.plans]
        self.issued = [[0.0] * n for n in sizes]
        self.start = [[0.0] * n for n in sizes]
        self.end = [[-1.0] * n for n in sizes]  # -1: it has not
        self.causes: list[list[Event]] = [[START] * n for n in sizes]
        self.rows = {plan.device: k for k, plan in enumerate(self.plans)}
        self.rendezvous = Rendezvous(lambda group: tuple(d for d in group if d in self.rows))
        self.lines: dict[Meeting, Line] = {}
        self.wiring = Wiring(self.network, self.sharing, self.alike, self.host.wire, self.core_of)
        self.cores = [self.core_of(plan.device) for plan in self.plans]

    def core_of(self, device: Device) -> int | None:
        if self.host.cores is None:
            return None
        return self.wiring.resource("cores", self.network.node(device), self.host.cores)

    def run(self) -> None:
        self.woken.extend(self.lanes())
        while True:
            while self.woken:
                self.advance(self.woken.popleft())
            timed = self.timers[0][0] if self.timers else None
            shared = self.sharing.next_end()
            if timed is None and shared is None:
                return
            if shared is None or (timed is not None and timed <= shared):
                self.now, _, act = heappop(self.timers)
            else:
                self.now, act = shared, self.acts.pop(self.sharing.end())
            act()

    def lanes(self) -> list[Lane]:
        if self.host.blocks:
            return [Lane(k, range(len(plan.instructions))) for k, plan in enumerate(self.plans)]
        found: dict[tuple[int, object], list[int]] = {}
        for k, plan in enumerate(self.plans):
            for at, one in enumerate(plan.instructions):
                found.setdefault((k, queue_of(one, plan.device)), []).append(at)
        return [Lane(k, positions) for (k, _), positions in found.items()]

    def advance(self, lane: Lane) -> None:
        """Go on until something takes time, or waits."""
        row, instructions = lane.row, self.plans[lane.row].instructions
        ends, positions = self.end[row], lane.positions
        while lane.at < len(positions):
            at = positions[lane.at]
            one = instructions[at]
            if lane.issued is None:
                lane.issued = self.now
            for wait in one.waits:
                if ends[wait] < 0:
                    self.asleep.setdefault((row, wait), []).append(lane)
                    return
            self.issued[row][at], self.start[row][at] = lane.issued, self.now
            lane.issued = None
            lane.at += 1
            lane.last = self.causes[row][at] = self.cause(lane, one.waits)
            if (self.compute if one.stream == COMPUTE else self.post)(lane, at, one):
                return

    def cause(self, lane: Lane, waits: Sequence[int]) -> Event:
        """What ended last of all that it waited for."""
        if waits:
            ends = self.end[lane.row]
            last = max(waits, key=ends.__getitem__)
            if ends[last] > (ends[lane.last[1]] if lane.last is not START else -1.0):
                return (lane.row, last)
        return lane.last

    def compute(self, lane: Lane, at: int, one: Instruction) -> bool:
        """Whether it takes time."""
        seconds, event = self.price(one) or self.host.each, (lane.row, at)
        if not seconds:
            self.ended(event)
            return False
        lane.last = event
        core, act = self.cores[lane.row], partial(self.finish, lane, event)
        if core is None:
            self.after(seconds, act)
        else:
            many = self.alike(self.plans[lane.row].device)[0]  # all of them on these cores
            self.begin(((core, seconds * many),), 1.0 / seconds, act)
        return True

    def finish(self, lane: Lane, event: Event) -> None:
        self.ended(event)
        self.woken.append(lane)

    def post(self, lane: Lane, at: int, one: Instruction) -> bool:
        """Start a message; whether the lane has to wait before it goes on."""
        event, device = (lane.row, at), self.plans[lane.row].device
        meeting = one.meeting(device)
        met = self.rendezvous.arrive(meeting, (device, at)) if meeting else None
        if meeting and met:
            line = self.lines.setdefault(meeting, Line())
            both = [(self.rows[other], there) for other, there in met]
            line.waiting.append((both, self.causes[lane.row][at]))
            if not line.busy:
                self.go(meeting, late=False)
        if self.host.blocks:
            seconds = self.host.post + self.price(one)
            if seconds:
                self.after(seconds, partial(self.woken.append, lane))
            return bool(seconds)
        if self.end[lane.row][at] >= 0:
            return False
        lane.last = event
        self.asleep.setdefault(event, []).append(lane)
        return True

    def go(self, key: Meeting, late: bool) -> None:
        """All are there, and what was before them on their line has gone."""
        line = self.lines[key]
        met, cause = line.waiting.popleft()
        for row, at in met:
            self.start[row][at] = self.now
            self.causes[row][at] = line.last if late else cause
        line.busy, line.last = True, met[0]
        latency, demands = self.needs(met)
        if not self.host.blocks:  # else the host has done its own part already
            latency += max(self.price(self.plans[row].instructions[at]) for row, at in met)
        if latency:
            self.after(latency, partial(self.move, key, met, demands))
        else:
            self.move(key, met, demands)

    def needs(self, met: Sequence[Event]) -> tuple[float, tuple[Demand, ...]]:
        """Latency and demands; messages of one size between the same devices need the same."""
        row, at = met[0]
        one, here = self.plans[row].instructions[at], self.plans[row].device
        key = (type(one), one.meeting(here), one.moves)
        if key not in self.needed:
            if isinstance(one, Send):
                self.needed[key] = self.wiring.transfer(one, here)
            else:
                everyone = [self.plans[k].device for k, _ in met]
                self.needed[key] = self.wiring.collective(one, everyone)
        return self.needed[key]

    def move(self, key: Meeting, met: list[Event], demands: tuple[Demand, ...]) -> None:
        if demands:
            self.begin(demands, FAST, partial(self.arrived, key, met))
        else:
            self.arrived(key, met)

    def arrived(self, key: Meeting, met: list[Event]) -> None:
        line = self.lines[key]
        line.busy = False
        for event in met:
            self.ended(event)
        if line.waiting:
            self.go(key, late=True)

    def ended(self, event: Event) -> None:
        self.end[event[0]][event[1]] = self.now
        if event in self.asleep:
            self.woken.extend(self.asleep.pop(event))

    def after(self, seconds: float, act: Act) -> None:
        self.count += 1
        heappush(self.timers, (self.now + seconds, self.count, act))

    def begin(self, demands: Sequence[Demand], fastest: float, act: Act) -> None:
        self.count += 1
        self.acts[self.count] = act
        self.sharing.begin(self.count, self.now, demands, fastest)


def queue_of(one: Instruction, device: Device) -> object:
    """What an instruction is in line with on a device whose host runs ahead."""
    return COMPUTE if isinstance(one, Total) else one.meeting(device) or COMPUTE
