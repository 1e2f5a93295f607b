"""What a message asks of the links between its devices, and of their cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log2

from piper.costs.links import Network
from piper.names import Device
from piper.plan.instructions import Exchange, Gather, Instruction, Reduce, Send, Total
from piper.plan.instructions.sizes import message_bytes, shape_bytes
from piper.sim.sharing import Demand, Sharing, total

FAST = 1e15  # what needs nothing ends at once


Alike = Callable[[Device], tuple[int, int]]  # how many do the same: in its node, and everywhere


def alone(device: Device) -> tuple[int, int]:
    return 1, 1


@dataclass
class Wiring:
    """The network as resources that things share; made when they are first used.

    `alike` says how many devices do the same as this one at the same time, when only one
    of them is on the clock. `wire` is the time of a core that a byte costs at each of its ends.
    """

    network: Network
    sharing: Sharing
    alike: Alike = alone
    wire: float = 0.0
    cores: Callable[[Device], int | None] = lambda device: None  # the resource, if any
    known: dict[tuple[str, object], int] = field(default_factory=dict)

    def resource(self, name: str, whose: object, capacity: float) -> int:
        key = (name, whose)
        if key not in self.known:
            self.known[key] = self.sharing.resource(capacity)
        return self.known[key]

    def transfer(self, send: Send, source: Device) -> tuple[float, tuple[Demand, ...]]:
        """Latency, and what it needs of each resource."""
        size = float(sum(map(shape_bytes, send.shapes)))
        demands = [*self.path(source, send.peer, size, send.stream)]
        demands += self.work((source, send.peer), size)
        return self.network.latency(source, send.peer), self.finite(demands)

    def finite(self, demands: Iterable[Demand]) -> tuple[Demand, ...]:
        """One demand for each resource that has an end."""
        limited = (one for one in demands if one[1] and self.sharing.capacity[one[0]] < inf)
        return total(limited)

    def path(self, source: Device, target: Device, size: float, stream: str) -> Iterator[Demand]:
        there = self.network
        if stream in there.streams:
            limit = there.streams[stream]
            yield self.resource(f"{stream} out", source, limit), size
            yield self.resource(f"{stream} in", target, limit), size
        if (source, target) in there.pairs:
            yield (
                self.resource("pair", (source, target), there.pairs[source, target].bandwidth),
                size,
            )
        elif there.node(source) == there.node(target):
            yield from self.ports("inside", there.inside.bandwidth, source, target, size)
        else:
            yield from self.ports("between", there.between.bandwidth, source, target, size)
            yield from self.shared(source, target, size)

    def ports(
        self, name: str, bandwidth: float, source: Device, target: Device, size: float
    ) -> Iterator[Demand]:
        yield self.resource(f"{name} out", source, bandwidth), size
        yield self.resource(f"{name} in", target, bandwidth), size

    def shared(self, source: Device, target: Device, size: float) -> Iterator[Demand]:
        """What leaves a node, and what crosses the switch of all of them."""
        there = self.network
        if there.uplink:
            rate = there.uplink.bandwidth
            out, into = self.alike(source)[0], self.alike(target)[0]
            yield self.resource("uplink out", there.node(source), rate), size * out
            yield self.resource("uplink in", there.node(target), rate), size * into
        if there.spine:
            yield self.resource("spine", 0, there.spine.bandwidth), size * self.alike(source)[1]

    def work(self, devices: Sequence[Device], size: float) -> Iterator[Demand]:
        """What sending and receiving costs the cores."""
        for device in devices:
            cores = self.cores(device)
            if cores is not None and self.wire:
                yield cores, size * self.wire * self.alike(device)[0]

    def collective(
        self, one: Instruction, here: Sequence[Device]
    ) -> tuple[float, tuple[Demand, ...]]:
        """Latency and demands of a meeting, as seen from those of the group that are on the clock.

        Reductions and gathers go in rings, in each node over all its ways out; rows of experts go
        to everyone directly.
        """
        assert isinstance(one, Reduce | Gather | Exchange | Total)
        times, size = volume(one)
        count, nodes = len(one.group), len({self.network.node(d) for d in one.group})
        local = count / nodes
        if isinstance(one, Exchange):
            inside, outside = size * (local - 1) / count, size * (count - local) / count
        else:
            inside = times * size * (count - 1) / count if local > 1 else 0.0
            outside = times * size * (nodes - 1) / nodes / local
        demands: list[Demand] = []
        for device in here:
            demands += self.meeting(device, one.stream, inside, outside)
            demands += self.work((device, device), inside + outside)
        return self.rounds(one, count, nodes), self.finite(demands)

    def meeting(
        self, device: Device, stream: str, inside: float, outside: float
    ) -> Iterator[Demand]:
        there = self.network
        if stream in there.streams:
            yield self.resource(f"{stream} out", device, there.streams[stream]), inside + outside
        if inside:
            yield from self.ports("inside", there.inside.bandwidth, device, device, inside)
        if outside:
            yield from self.ports("between", there.between.bandwidth, device, device, outside)
            yield from self.shared(device, device, outside)

    def rounds(self, one: Reduce | Gather | Exchange | Total, count: int, nodes: int) -> float:
        """How often a meeting waits for a latency: trees for sums, one way for rows and counts."""
        if count == 1:
            return 0.0
        once = (self.network.between if nodes > 1 else self.network.inside).latency
        if isinstance(one, Exchange):
            return once * (2 if one.way == "counted" else 1)
        messages = 1 if isinstance(one, Total) else len(one.messages)
        return volume(one)[0] * once * ceil(log2(count)) * messages


def volume(one: Reduce | Gather | Exchange | Total) -> tuple[int, float]:
    """How often the bytes of a meeting go around, and how many they are."""
    if isinstance(one, Total):
        return 2, 0.0
    if isinstance(one, Exchange):
        return 1, float(sum(map(shape_bytes, one.shapes)))
    both = 2 if isinstance(one, Reduce) and not one.scatter else 1
    return both, float(sum(map(message_bytes, one.messages)))
