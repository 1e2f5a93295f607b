"""Schedule all nodes: one sequence in time, which every device follows.

This is a list scheduler. Each lane (devices that run the same nodes) runs the best ready node as
soon as it is free. `Order` directives leave it no choice, except inside a slot: there the node with
the longest path to the end goes first, so that the communication of one part hides behind the
compute of another. Without an order, the schedule is like 1F1B: backward first, and no more
microbatches in flight than the rest of the pipeline needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain
from typing import assert_never

from piper.costs import Costs
from piper.ir.dag import Dag
from piper.ir.graph import Topology
from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Node,
    Redistribute,
    Store,
    Totals,
    Transfer,
    Update,
)
from piper.ir.placement.placements import Step
from piper.ir.placement.replicas import distinct
from piper.ir.sizes import node_bytes
from piper.names import BI, BW, B, F, NodeId, Phase, RegionId
from piper.passes.upward_ranks import upward_ranks

RANK = {B: 0, BI: 0, F: 1, BW: 2}
ASYNCHRONOUS = -1  # the lane of all communication
IN_TURN = (Exchange, Redistribute)  # messages of a stream that wait for each other
WORTH = 0.98  # of the time with less freedom
Priority = tuple[float, float, int]


def schedule(dag: Dag, costs: Costs) -> Dag:
    """The DAG with its `sequence` (all nodes by start time) and the predicted times.

    Where slots may start ahead of time, a device that does so may keep the next stage waiting. So
    the same slots are tried in turn, too. More freedom must gain something worth its risk: the
    times of messages are only predicted.
    """
    dags = [dag.with_precedences(orders) for orders in reversed(dag.stricter)]
    first, *others = (scheduled(one, costs) for one in (*dags, dag) if not one.topology.stuck)
    found = first
    for other in others:
        found = other if other.seconds < WORTH * found.seconds else found
    return dag.known_to(replace(dag, sequence=tuple(found.sequence), times=found.times))


def scheduled(dag: Dag, costs: Costs) -> ListScheduler:
    scheduler = ListScheduler(dag, costs)
    scheduler.run()
    return scheduler


@dataclass
class ListScheduler:
    """The state of the scheduler: ready nodes, busy lanes, and running nodes by end time."""

    dag: Dag
    costs: Costs
    graph: Topology = field(init=False)
    ready: dict[int, list[tuple[Priority, int]]] = field(default_factory=dict)  # heaps, by lane
    endings: list[tuple[float, int]] = field(default_factory=list)  # heap of (time, vertex)
    busy: set[int] = field(default_factory=set)  # lanes
    in_flight: dict[RegionId, int] = field(default_factory=dict)  # microbatches, by region
    held: dict[RegionId, list[int]] = field(default_factory=dict)  # forwards held back by the limit
    sequence: list[NodeId] = field(default_factory=list)
    times: dict[NodeId, tuple[float, float]] = field(default_factory=dict)  # start, end
    links: dict[tuple[int, str], float] = field(default_factory=dict)  # free from this time on
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.graph = self.dag.topology
        self.left = list(self.graph.indegree)
        self.nodes = list(self.dag.nodes.values())
        table = self.dag.lanes
        self.lane = [lane_of(node, table) for node in self.nodes]
        self.cost = durations(self.dag, self.costs)
        self.rank = upward_ranks(self.dag, self.cost)
        self.table = table
        self.limit = flight_limits(self.dag, table)
        orders = [p for p in self.dag.precedences if p.maker.is_order and not p.partial]
        self.ordered = set(chain.from_iterable((*p.before, *p.after) for p in orders))

    def run(self) -> list[NodeId]:
        self.arrive([k for k, count in enumerate(self.left) if not count], 0.0)
        self.start_free_lanes(0.0)
        while self.endings or self.release_held():
            now = self.start_free_lanes(self.endings[0][0] if self.endings else 0.0)
            while self.endings and self.endings[0][0] <= now:
                self.end(heappop(self.endings)[1], now)
            self.start_free_lanes(now)
        return self.sequence

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return max((end for _, end in self.times.values()), default=0.0)

    def arrive(self, vertices: list[int], now: float) -> None:
        """These vertices have become ready."""
        for k in vertices:
            if k >= len(self.nodes):
                self.end(k, now)
            elif self.lane[k] == ASYNCHRONOUS:
                self.begin(k, self.link_free(self.nodes[k], now, self.cost[k]), self.cost[k])
            elif not self.hold_back(k):
                self.arrivals += 1
                rank = self.priority(k)
                heappush(self.ready.setdefault(self.lane[k], []), (rank, k))

    def priority(self, k: int) -> Priority:
        """Where regions are sharded, ordered nodes go by upward rank."""
        node = self.nodes[k]
        if self.rank and node.id in self.ordered:
            return (-1, -self.rank[k], k)
        return priority(node, k, self.arrivals)

    def begin(self, k: int, now: float, cost: float) -> None:
        self.sequence.append(self.graph.ids[k])
        self.times[self.graph.ids[k]] = (now, now + cost)
        heappush(self.endings, (now + cost, k))

    def link_free(self, node: Node, now: float, cost: float) -> float:
        """When it can start. Such messages of a stream run one after the other."""
        if not isinstance(node, IN_TURN):
            return now
        link = self.table[node.devices], node.stream
        start = max(now, self.links.get(link, 0.0))
        self.links[link] = start + cost
        return start

    def start_free_lanes(self, now: float) -> float:
        for lane, heap in self.ready.items():
            if heap and lane not in self.busy:
                self.busy.add(lane)
                k = heappop(heap)[1]
                self.begin(k, now, self.cost[k])
        return now

    def end(self, k: int, now: float) -> None:
        if k < len(self.nodes):
            self.busy.discard(self.lane[k])
            self.finish_microbatch(self.nodes[k], now)
        free = []
        for after in self.graph.successors[k]:
            self.left[after] -= 1
            if not self.left[after]:
                free.append(after)
        self.arrive(free, now)

    def hold_back(self, k: int) -> bool:
        """Hold back a forward if its region has enough microbatches in flight. Returns whether."""
        node = self.nodes[k]
        if not isinstance(node, Compute) or node.phase is not F or node.region not in self.limit:
            return False
        full = self.in_flight.get(node.region, 0) >= self.limit[node.region]
        if full and node.id not in self.ordered:
            self.held.setdefault(node.region, []).append(k)
            return True
        self.in_flight[node.region] = self.in_flight.get(node.region, 0) + 1
        return False

    def finish_microbatch(self, node: Node, now: float) -> None:
        """A microbatch has finished in this region, so one that was held back may start."""
        if isinstance(node, Compute) and node.phase in (B, BW):
            self.in_flight[node.region] -= 1
            if self.held.get(node.region):
                self.arrive([self.held[node.region].pop(0)], now)

    def release_held(self) -> bool:
        """Start a held-back forward if nothing else can run: a limit must not stop the step."""
        for region, waiting in self.held.items():
            if waiting:
                self.in_flight[region] = 0
                self.arrive([waiting.pop(0)], 0.0)
                return True
        return any(self.ready.values())


def lane_of(node: Node, table: dict[tuple[int, ...], int]) -> int:
    match node:
        case Transfer() | Collective() | Exchange() | Store() | Fetch() | Totals():
            return ASYNCHRONOUS
        case Redistribute():
            return ASYNCHRONOUS if node.is_message else table[node.devices]
        case Compute() | Update():
            assert node.devices is not None
            return table[node.devices]
        case _:
            assert_never(node)


def durations(dag: Dag, costs: Costs) -> list[float]:
    """The predicted duration of each node.

    Inside a slot only token all-to-alls and conversions are waited for. Durations of transfers do
    not change the order, unless slots overlap.
    """
    known: dict[tuple[RegionId, Phase], float] = {}

    def seconds(node: Node) -> float:
        match node:
            case Compute():
                key = node.region, node.phase
                if key not in known:
                    known[key] = costs.region(dag.model, dag.model.by_id[node.region], node.phase)
                return known[key] * most_replicas(node.devices or ())
            case Exchange():
                size = sum(dag.values[value].nbytes for value in node.rows)
                ways = len(node.groups[0])
                return costs.message(size * (ways - 1) / ways, node.stream)
            case Redistribute():
                return costs.message(sent_bytes(dag, node), node.stream) if node.is_message else 0.0
            case Transfer():
                return costs.message(node_bytes(dag, node), node.stream) if loose else 0.0
            case Update():
                return update
            case Collective() | Store() | Fetch() | Totals():
                return 0.0
            case _:
                assert_never(node)

    loose = bool(dag.shardings or dag.divisions) and (
        bool(dag.stricter) or any(order.loose for order in dag.precedences)
    )
    update = min((costs.region(dag.model, r, F) for r in dag.model.regions), default=1.0)
    return [seconds(node) for node in dag.nodes.values()]


def most_replicas(devices: tuple[int, ...]) -> int:
    """How often the busiest device runs a node: once for each of its replicas."""
    if len(distinct(devices)) == len(devices):
        return 1
    return max(Counter(devices).values())


def sent_bytes(dag: Dag, node: Redistribute) -> float:
    """What a device sends in a ring: an all-reduce scatters and gathers."""
    ways = len(node.groups[0])
    if node.step in (Step.SHIFT, Step.SHIFT_BACK):
        return node_bytes(dag, node)
    twice = 2 if node.step is Step.ALL_REDUCE else 1
    return twice * node_bytes(dag, node) * (ways - 1) / ways


def expect_messages(dag: Dag, costs: Costs) -> Dag:
    """The DAG with the predicted transfer times of its messages."""
    known: dict[tuple[int, str], float] = {}  # of what is sent: microbatches share values
    found: dict[NodeId, tuple[float, float]] = {}
    for node in dag.nodes.values():
        if isinstance(node, Transfer):
            key = id(dag.values[node.writes[0]]), node.stream
            if key not in known:
                known[key] = costs.transit(node_bytes(dag, node), node.stream)
            found[node.id] = (costs.latency, known[key])
        elif isinstance(node, Collective):
            seconds = costs.transit(node_bytes(dag, node), node.stream)
            found[node.id] = (costs.latency, seconds)
    return dag.known_to(replace(dag, transits=found))


def priority(node: Node, k: int, arrival: int) -> Priority:
    """Backward before forward, then the oldest microbatch, then the deepest region.

    Updates come last, in the order in which their gradients are ready.
    """
    if not isinstance(node, Compute):
        return (3, arrival, k)
    return (RANK[node.phase], node.microbatch or 0, -k if node.phase is F else k)


def placed(dag: Dag) -> Iterator[tuple[RegionId, tuple[int, ...]]]:
    kinds = (Compute, Redistribute)
    for node in dag.nodes.values():
        if isinstance(node, kinds) and node.devices:
            yield node.region, node.devices


def flight_limits(dag: Dag, table: dict[tuple[int, ...], int]) -> dict[RegionId, int]:
    """How many microbatches a region needs in flight to keep the later lanes busy."""
    lane = {region: table[devices] for region, devices in placed(dag)}
    reader: dict[str, list[RegionId]] = {}
    hops: dict[RegionId, int] = {}
    for region in reversed(dag.model.regions):
        later = chain.from_iterable(reader.get(value, ()) for value in region.outputs)
        here = lane.get(region.id)
        hops[region.id] = max((hops[r] + (lane.get(r, here) != here) for r in later), default=0)
        for value in region.inputs:
            reader.setdefault(value, []).append(region.id)
    return {r.id: hops[r.id] + 1 for r in dag.model.regions if r.has_backward and r.id in lane}
