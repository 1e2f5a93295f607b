"""Repair a sequence after new edges: the same order in time, except where an edge forbids it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.graph import Topology, with_precedences
from piper.ir.maker import Maker
from piper.ir.nodes import Collective, Compute, Precedence, Update
from piper.ir.rules.flow import nothing_waits_for_itself
from piper.names import NodeId

CHOSEN, BUFFER = Maker("the schedule that Piper chose"), Maker("they use the same gather buffer")


def resequenced(dag: Dag) -> Dag:
    """Each lane keeps the order of its passes, and each gather buffer that of its gathers."""
    if dag.topology.stuck:
        return dag  # a cycle, which the rules draw
    fixed = (*dag.precedences, *pass_order(dag), *buffer_order(dag))
    graph = with_precedences(dag.data_flow, fixed)
    if graph.stuck:
        raise Refused(*map(in_use, nothing_waits_for_itself(replace(dag, precedences=fixed))))
    return dag.known_to(replace(dag, sequence=tuple(in_old_order(dag, graph))))


def in_use(drawn: Problem) -> Problem:
    """The cycle of a gather that an order wants where no buffer is free for it."""
    buffers = str(BUFFER) in drawn.what
    fix = "write more gather_buffers in its `Replicate`, or let the order gather it later"
    return Problem(drawn.what, fix if buffers else "say it all in one `Order`")


def pass_order(dag: Dag) -> Iterator[Precedence]:
    table, by_lane = dag.lanes, dict[int, list[NodeId]]()
    for node in map(dag.nodes.__getitem__, dag.sequence):
        if isinstance(node, Compute | Update) and node.devices:
            by_lane.setdefault(table[node.devices], []).append(node.id)
    for names in by_lane.values():
        yield from (Precedence((a,), (b,), CHOSEN) for a, b in pairwise(names))


def buffer_order(dag: Dag) -> Iterator[Precedence]:
    """A buffer is filled again after its last reader."""
    table, filled = dag.lanes, dict[tuple[int, int], Collective]()
    for node in map(dag.nodes.__getitem__, dag.sequence):
        if isinstance(node, Collective) and node.slot is not None:
            place = table[node.devices], node.slot
            if place in filled:
                readers = dag.consumers.get(filled[place].writes[0], ())
                before = (filled[place].id, *dict.fromkeys(readers))
                yield Precedence(before, (node.id,), BUFFER)
            filled[place] = node


def in_old_order(dag: Dag, graph: Topology) -> Iterator[NodeId]:
    """A topological order, by the places in the old sequence."""
    old = {name: k for k, name in enumerate(dag.sequence)}
    place = [*(old[name] for name in graph.ids), *([-1] * (len(graph.successors) - len(old)))]
    left = list(graph.indegree)
    ready = [(place[k], k) for k, degree in enumerate(left) if not degree]
    heapify(ready)
    while ready:
        k = heappop(ready)[1]
        if k < len(graph.ids):
            yield graph.ids[k]
        for after in graph.successors[k]:
            left[after] -= 1
            if not left[after]:
                heappush(ready, (place[after], after))
