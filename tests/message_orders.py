"""Random orders that name messages, updates and passes of a compiled strategy."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from piper.directives import Order
from piper.ir.dag import Dag
from piper.ir.filters import Filter, where
from piper.ir.nodes import Collective, Compute, Kind, Node, Totals, Transfer
from piper.ir.operations import operation_index
from piper.names import PASS, NodeId
from piper.passes.split_backwards import SPLIT_BACKWARDS


class Named:
    """The nodes of a DAG that one filter each can name, by lane, in one order in time."""

    def __init__(self, dag: Dag, chance: Random) -> None:
        self.dag, self.chance = dag, chance
        uses = dict(gathers_by_use(dag))
        self.index = operation_index(dag, uses)
        self.tables = {}
        for name, tags in self.index.entries:
            self.tables.setdefault(name, []).append(tags)
        self.lane_of = dag.lanes
        self.order = list(random_order(dag, chance))

    def filters(self, node: Node) -> Iterator[tuple[int, Filter]]:
        """The filters that select this node alone, each with the lane that it is about."""
        if isinstance(node, Compute):
            if self.dag.makers[node.id] == SPLIT_BACKWARDS:
                return  # no half for a directive to name
            run = self.dag.model.by_id[node.region].run
            tags = {"RUN": run} if "RUN" in self.dag.tag_names else {}
            mine = dict(node.tags)
            others = [k for k in self.dag.tag_names if k not in (*mine, "RUN", PASS)]
            wanted = where(**tags, **mine, **dict.fromkeys(others), PASS=str(node.phase))
            if [one.id for one in self.dag.select(wanted)] == [node.id]:
                yield self.lane_of[node.devices], wanted
            return
        for tags in self.tables.get(node.id, ()):
            wanted = Filter(tuple(tags.items()))
            if self.index.select(wanted) == [node.id]:
                sends = tags[PASS] == "SEND" and isinstance(node, Transfer)
                yield self.lane_of[node.source if sends else node.devices], wanted

    def drawn(self, slots: int, anywhere: bool = False) -> Order | None:
        """Some nodes of one lane, or of any, in an order that the dataflow allows."""
        found: dict[int, list[tuple[bool, Filter]]] = {}
        for node in map(self.dag.nodes.__getitem__, self.order):
            ends = list(dict(self.filters(node)).items())
            if anywhere and ends:
                ends = [(0, self.chance.choice(ends)[1])]
            for lane, wanted in ends:  # one end of a transfer
                found.setdefault(lane, []).append((isinstance(node, Compute), wanted))
        lane = self.chance.choice(list(found))
        picked = sorted(self.chance.sample(range(len(found[lane])), min(slots, len(found[lane]))))
        chosen = [found[lane][k] for k in picked]
        if all(is_pass for is_pass, _ in chosen) or len(chosen) < 2:
            return None
        return Order([[wanted] for _, wanted in chosen])

    def against(self) -> Order | None:
        """A node before one of those that it reads from, on a device of both."""
        edges = [(before, node.id) for node in self.dag.nodes.values()
                 for before in self.dag.predecessors(node)]  # fmt: skip
        self.chance.shuffle(edges)
        for before, after in edges:
            first, second = (dict(self.filters(self.dag.nodes[n])) for n in (after, before))
            lane = next((lane for lane in first if lane in second), None)
            both = [isinstance(self.dag.nodes[n], Compute) for n in (before, after)]
            if lane is not None and not all(both):
                return Order([[first[lane]], [second[lane]]])
        return None


def gathers_by_use(dag: Dag) -> Iterator[tuple[NodeId, Compute]]:
    """Gathers of zero=3, with the first pass that reads each."""
    place = {name: k for k, name in enumerate(dag.sequence)}
    for node in dag.nodes.values():
        if isinstance(node, Collective) and node.kind is Kind.ALL_GATHER:
            readers = [dag.nodes[name] for name in dag.consumers.get(node.writes[0], ())]
            uses = [one for one in readers if isinstance(one, Compute)]
            bucket = dag.values[node.writes[0]].bucket
            if uses and dag.residencies[bucket].zero == 3:
                yield node.id, min(uses, key=lambda one: place[one.id])


def random_order(dag: Dag, chance: Random) -> Iterator[NodeId]:
    """Any order in time that data and orders allow."""
    graph = dag.topology
    left = list(graph.indegree)
    ready = [k for k, degree in enumerate(left) if not degree]
    while ready:
        k = ready.pop(chance.randrange(len(ready)))
        if k < len(graph.ids) and not isinstance(dag.nodes[graph.ids[k]], Totals):
            yield graph.ids[k]
        for after in graph.successors[k]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
