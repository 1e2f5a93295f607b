"""All dependencies as one graph of integers: data edges and precedences, in linear time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from piper.ir.nodes import Node, Precedence
from piper.names import NodeId, ValueId


@dataclass(frozen=True)
class Topology:
    """Vertices are the nodes, then the precedences, so that an edge between groups stays linear."""

    ids: tuple[NodeId, ...]
    successors: list[list[int]]
    indegree: list[int]

    @cached_property
    def in_order(self) -> list[int]:
        """Vertices in topological order, without those on a cycle or behind one."""
        indegree, successors = list(self.indegree), self.successors
        found = [k for k, degree in enumerate(indegree) if not degree]
        for k in found:  # it grows
            for after in successors[k]:
                indegree[after] -= 1
                if not indegree[after]:
                    found.append(after)
        return found

    @property
    def stuck(self) -> set[int]:
        """The vertices that can never run: those on a cycle or behind one."""
        done, size = self.in_order, len(self.indegree)
        return set(range(size)).difference(done) if len(done) < size else set()


def data_flow(nodes: Mapping[NodeId, Node]) -> Topology:
    """The graph without precedences."""
    writer = written_by(nodes)
    successors: list[list[int]] = [[] for _ in nodes]
    indegree = [0] * len(nodes)
    for k, node in enumerate(nodes.values()):
        for total in node.reads:
            for value in total:
                maker = writer.get(value)
                if maker is not None:
                    successors[maker].append(k)
                    indegree[k] += 1
    return Topology(tuple(nodes), successors, indegree)


def written_by(nodes: Mapping[NodeId, Node]) -> dict[ValueId, int]:
    return {value: k for k, node in enumerate(nodes.values()) for value in node.writes}


def with_precedences(flow: Topology, precedences: Sequence[Precedence]) -> Topology:
    """Each precedence is a vertex between the nodes before and after it."""
    successors = [*map(list, flow.successors), *([] for _ in precedences)]
    indegree = [*flow.indegree, *(len(one.before) for one in precedences)]
    number = {node: k for k, node in enumerate(flow.ids)}
    for k, precedence in enumerate(precedences, start=len(flow.ids)):
        for before in precedence.before:
            successors[number[before]].append(k)
        for after in precedence.after:
            successors[k].append(number[after])
            indegree[number[after]] += 1
    return Topology(flow.ids, successors, indegree)
