"""Run the plans of all devices together on a clock.

A host that blocks (CPU) runs one instruction after the other and waits where the plan says so;
messages are asynchronous. A host that runs ahead (GPU) only enqueues: each stream runs in order,
and an instruction starts as soon as its waits have completed.
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
from piper.plan.instructions import Fetch, Instruction, Plan, Send, Store, Total
from piper.plan.instructions.communicator import Communicator
from piper.plan.rendezvous import Rendezvous
from piper.sim.fair_sharing import Demand, FairSharing
from piper.sim.message_queue import START, Event, Match, MessageQueue
from piper.sim.network_demands import FAST, Alike, NetworkDemands, alone
from piper.sim.slowed_compute import SlowedCompute

Price = Callable[[Instruction], float]  # seconds that an instruction takes on its device
Act = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated step, and the cause of each start: what was waited for last."""

    trace: Trace
    plans: tuple[Plan, ...]
    causes: tuple[Sequence[Event], ...]  # for each plan: the event that each start waited for
    seconds: float


def simulate(
    plans: Sequence[Plan],
    price: Price | Sequence[Price],
    network: Network | None = None,
    host: Host | Sequence[Host] | None = None,
    name: str = "simulated",
    alike: Alike = alone,
) -> Simulated:
    """Simulate one step.

    Members of a group that have no plan arrive together with the others. `alike` is the number of
    devices that do the same as a given one. If devices are of different kinds, there is a price and
    a host for each plan; all hosts must wait in the same way.
    """
    prices = (price,) * len(plans) if callable(price) else tuple(price)
    hosts = tuple(host) if isinstance(host, Sequence) else (host or Host(),) * len(plans)
    clock = Clock(tuple(plans), prices, network or Network(), hosts, alike)
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
    """Instructions that run in order: a whole plan if the host blocks, else one stream of it."""

    plan: int  # index of the plan
    positions: Sequence[int]
    at: int = 0
    issued: float | None = None
    last: Event = START  # its previous event


@dataclass
class Clock:
    """All devices, and everything in progress."""

    plans: tuple[Plan, ...]
    prices: tuple[Price, ...]  # of each plan
    network: Network
    hosts: tuple[Host, ...]  # of each plan
    alike: Alike
    now: float = 0.0
    timers: list[tuple[float, int, Act]] = field(default_factory=list)
    sharing: FairSharing = field(default_factory=FairSharing)
    acts: dict[int, Act] = field(default_factory=dict)  # activity -> what to do when it ends
    asleep: dict[Event, list[Lane]] = field(default_factory=dict)
    woken: deque[Lane] = field(default_factory=deque)
    count: int = 0
    needed: dict[object, tuple[float, tuple[Demand, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host = self.hosts[0] if self.hosts else Host()  # what they have in common
        sizes = [len(plan.instructions) for plan in self.plans]
        self.issued = [[0.0] * n for n in sizes]
        self.start = [[0.0] * n for n in sizes]
        self.end = [[-1.0] * n for n in sizes]  # -1: not yet
        self.causes: list[list[Event]] = [[START] * n for n in sizes]
        self.index = {plan.device: k for k, plan in enumerate(self.plans)}
        self.rendezvous = Rendezvous(lambda group: tuple(d for d in group if d in self.index))
        self.queues: dict[Communicator, MessageQueue] = {}
        self.demands = NetworkDemands(
            self.network, self.sharing, self.alike, self.host.wire, self.core_of
        )
        self.cores = [self.core_of(plan.device) for plan in self.plans]
        factors = [host.beside for host in self.hosts]
        self.slowed = SlowedCompute(factors, lambda: self.now, self.after)

    def core_of(self, device: Device) -> int | None:
        if self.host.cores is None:
            return None
        return self.demands.resource("cores", self.network.node(device), self.host.cores)

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
        """Run instructions until one takes time or waits."""
        plan, instructions = lane.plan, self.plans[lane.plan].instructions
        ends, positions = self.end[plan], lane.positions
        while lane.at < len(positions):
            at = positions[lane.at]
            one = instructions[at]
            if lane.issued is None:
                lane.issued = self.now
            for wait in one.waits:
                if ends[wait] < 0:
                    self.asleep.setdefault((plan, wait), []).append(lane)
                    return
            self.issued[plan][at], self.start[plan][at] = lane.issued, self.now
            lane.issued = None
            lane.at += 1
            lane.last = self.causes[plan][at] = self.cause(lane, one.waits)
            local = one.stream == COMPUTE or isinstance(one, Store | Fetch)
            if (self.compute if local else self.post)(lane, at, one):
                return

    def cause(self, lane: Lane, waits: Sequence[int]) -> Event:
        """The event that ended last of all that it waited for."""
        if waits:
            ends = self.end[lane.plan]
            last = max(waits, key=ends.__getitem__)
            if ends[last] > (ends[lane.last[1]] if lane.last is not START else -1.0):
                return (lane.plan, last)
        return lane.last

    def compute(self, lane: Lane, at: int, one: Instruction) -> bool:
        """Start a computation, or a copy to the host or back. Returns whether it takes time."""
        seconds = self.prices[lane.plan](one) or self.hosts[lane.plan].each
        event = (lane.plan, at)
        if not seconds:
            self.ended(event)
            return False
        lane.last = event
        core, act = self.cores[lane.plan], partial(self.finish, lane, event)
        if core is None and one.stream == COMPUTE:
            self.slowed.begin(lane.plan, seconds, act)
        elif core is None:
            self.after(seconds, act)
        else:
            many = self.alike(self.plans[lane.plan].device)[0]  # all of them share these cores
            self.begin(((core, seconds * many),), 1.0 / seconds, act)
        return True

    def finish(self, lane: Lane, event: Event) -> None:
        self.ended(event)
        self.woken.append(lane)

    def post(self, lane: Lane, at: int, one: Instruction) -> bool:
        """Start a message. Returns whether the lane has to wait before it goes on."""
        event, device = (lane.plan, at), self.plans[lane.plan].device
        communicator = one.communicator(device)
        met = self.rendezvous.arrive(communicator, (device, at)) if communicator else None
        if communicator and met:
            queue = self.queues.setdefault(communicator, MessageQueue())
            both = [(self.index[other], there) for other, there in met]
            queue.waiting.append((both, self.causes[lane.plan][at]))
            if not queue.busy:
                self.go(communicator, late=False)
        if self.host.blocks:
            seconds = self.hosts[lane.plan].post + self.prices[lane.plan](one)
            if seconds:
                self.after(seconds, partial(self.woken.append, lane))
            return bool(seconds)
        if self.end[lane.plan][at] >= 0:
            return False
        lane.last = event
        self.asleep.setdefault(event, []).append(lane)
        return True

    def go(self, key: Communicator, late: bool) -> None:
        """Start the next message of a communicator. `late`: it waited for the one before it."""
        queue = self.queues[key]
        met, cause = queue.waiting.popleft()
        for plan, at in met:
            self.slowed.messages(plan, 1)
            self.start[plan][at] = self.now
            self.causes[plan][at] = queue.last if late else cause
        queue.busy, queue.last = True, met[0]
        latency, demands = self.needs(met)
        if not self.host.blocks:  # otherwise the host has spent this time already
            latency += max(self.prices[plan](self.plans[plan].instructions[at]) for plan, at in met)
        if latency:
            self.after(latency, partial(self.move, key, met, demands))
        else:
            self.move(key, met, demands)

    def needs(self, met: Sequence[Event]) -> tuple[float, tuple[Demand, ...]]:
        """Latency and demands of a message, cached by communicator and size."""
        plan, at = met[0]
        one, here = self.plans[plan].instructions[at], self.plans[plan].device
        key = (type(one), one.communicator(here), one.moves)
        if key not in self.needed:
            if isinstance(one, Send):
                self.needed[key] = self.demands.transfer(one, here)
            else:
                everyone = [self.plans[k].device for k, _ in met]
                self.needed[key] = self.demands.collective(one, everyone)
        return self.needed[key]

    def move(self, key: Communicator, met: Match, demands: tuple[Demand, ...]) -> None:
        if demands:
            self.begin(demands, FAST, partial(self.arrived, key, met))
        else:
            self.arrived(key, met)

    def arrived(self, key: Communicator, met: Match) -> None:
        queue = self.queues[key]
        queue.busy = False
        for event in met:
            self.slowed.messages(event[0], -1)
            self.ended(event)
        if queue.waiting:
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
    """The queue of an instruction on a device whose host runs ahead."""
    if isinstance(one, Store | Fetch):
        return one.stream, one.kind  # copies in both directions run at once
    return COMPUTE if isinstance(one, Total) else one.communicator(device) or COMPUTE
