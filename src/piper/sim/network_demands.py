"""What a message demands of the links between its devices, and of their cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log2

from piper.costs.links import Network
from piper.names import Device
from piper.plan.analyse.traffic import Collective, is_direct, split_by_node, volume
from piper.plan.instructions import (
    Exchange,
    Gather,
    Instruction,
    Redistribute,
    Reduce,
    Send,
    Total,
)
from piper.plan.instructions.sizes import shape_bytes
from piper.sim.fair_sharing import Demand, FairSharing, total

FAST = 1e15  # speed of what demands nothing


Alike = Callable[[Device], tuple[int, int]]  # devices that do the same: in its node, in total


def alone(device: Device) -> tuple[int, int]:
    return 1, 1


@dataclass
class NetworkDemands:
    """The network as shared resources, which are created when they are first used.

    `alike` is the number of devices that do the same at the same time, if only one of them is
    simulated. `wire` is the core time per byte at each end of a message.
    """

    network: Network
    sharing: FairSharing
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
        """Latency, and the demand on each resource."""
        size = float(sum(map(shape_bytes, send.shapes)))
        demands = [*self.path(source, send.peer, size, send.stream)]
        demands += self.work((source, send.peer), size)
        return self.network.latency(source, send.peer), self.finite(demands)

    def finite(self, demands: Iterable[Demand]) -> tuple[Demand, ...]:
        """One demand for each resource with a finite capacity."""
        limited = (one for one in demands if one[1] and self.sharing.capacity[one[0]] < inf)
        return total(limited)

    def path(self, source: Device, target: Device, size: float, stream: str) -> Iterator[Demand]:
        network = self.network
        if stream in network.streams:
            limit = network.streams[stream]
            yield self.resource(f"{stream} out", source, limit), size
            yield self.resource(f"{stream} in", target, limit), size
        if (source, target) in network.pairs:
            yield (
                self.resource("pair", (source, target), network.pairs[source, target].bandwidth),
                size,
            )
        elif network.node(source) == network.node(target):
            yield from self.ports("inside", network.inside.bandwidth, source, target, size)
        else:
            yield from self.ports("between", network.between.bandwidth, source, target, size)
            yield from self.shared(source, target, size)

    def ports(
        self, name: str, bandwidth: float, source: Device, target: Device, size: float
    ) -> Iterator[Demand]:
        yield self.resource(f"{name} out", source, bandwidth), size
        yield self.resource(f"{name} in", target, bandwidth), size

    def shared(self, source: Device, target: Device, size: float) -> Iterator[Demand]:
        """Demands on the uplinks of both nodes, and on the spine switch."""
        network = self.network
        if network.uplink:
            rate = network.uplink.bandwidth
            out, into = self.alike(source)[0], self.alike(target)[0]
            yield self.resource("uplink out", network.node(source), rate), size * out
            yield self.resource("uplink in", network.node(target), rate), size * into
        if network.spine:
            yield self.resource("spine", 0, network.spine.bandwidth), size * self.alike(source)[1]

    def work(self, devices: Sequence[Device], size: float) -> Iterator[Demand]:
        """Core time for sending and receiving."""
        for device in devices:
            cores = self.cores(device)
            if cores is not None and self.wire:
                yield cores, size * self.wire * self.alike(device)[0]

    def collective(
        self, one: Instruction, here: Sequence[Device]
    ) -> tuple[float, tuple[Demand, ...]]:
        """Latency and demands of a collective, for the members of its group that are simulated.

        What stays in a node and what leaves it: `plan/analyse/traffic.py`.
        """
        assert isinstance(one, Reduce | Gather | Exchange | Redistribute | Total)
        count, nodes = len(one.group), len({self.network.node(d) for d in one.group})
        inside, outside = split_by_node(one, nodes)
        demands: list[Demand] = []
        for device in here:
            demands += self.member_demands(device, one.stream, inside, outside)
            demands += self.work((device, device), inside + outside)
        return self.rounds(one, count, nodes), self.finite(demands)

    def member_demands(
        self, device: Device, stream: str, inside: float, outside: float
    ) -> Iterator[Demand]:
        network = self.network
        if stream in network.streams:
            yield self.resource(f"{stream} out", device, network.streams[stream]), inside + outside
        if inside:
            yield from self.ports("inside", network.inside.bandwidth, device, device, inside)
        if outside:
            yield from self.ports("between", network.between.bandwidth, device, device, outside)
            yield from self.shared(device, device, outside)

    def rounds(self, one: Collective, count: int, nodes: int) -> float:
        """Total latency of a collective: trees for sums, one hop for tokens and one for counts."""
        if count == 1:
            return 0.0
        once = (self.network.between if nodes > 1 else self.network.inside).latency
        if isinstance(one, Exchange):
            return once * (2 if one.way == "counted" else 1)
        if is_direct(one):
            return once
        messages = len(one.messages) if isinstance(one, Reduce | Gather) else 1
        return volume(one)[0] * once * ceil(log2(count)) * messages
