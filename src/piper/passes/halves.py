"""Cut backwards in two where tokens wait for the first half: the second one hides their journey."""

from __future__ import annotations

from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.nodes import Node, Precedence
from piper.ir.training import split_backward
from piper.names import B, NodeId, RegionId


def cut_backwards(dag: Dag) -> Dag:
    """A backward whose result travels from or to experts is cut in BI and BW.

    rewrite:
        B(EP=0) -> exchange
        -->
        BI(EP=0) -> exchange        BW needs nobody, and runs while rows are on their way
               \\-> BW(EP=0)
    """
    wanted = beside_experts(dag)
    cut = {
        node.id: split_backward(dag, node)
        for node in dag.computes
        if node.phase is B and node.region in wanted
    }
    if not cut:
        return dag
    nodes: dict[NodeId, Node] = {}
    for node in dag.nodes.values():
        nodes.update((part.id, part) for part in cut.get(node.id, (node,)))
    makers = {name: dag.makers.get(name, "halves") for name in nodes}
    halves = {name: tuple(part.id for part in pair) for name, pair in cut.items()}
    orders = tuple(renamed(order, halves) for order in dag.precedences)
    return replace(dag, nodes=nodes, makers=makers, precedences=orders)


def beside_experts(dag: Dag) -> set[RegionId]:
    """Sharded regions, and regions that read what they write: both send gradients on a journey."""
    away = {v for r in dag.shardings for v in dag.model.by_id[r].outputs}
    near = {r.id for r in dag.model.regions if not away.isdisjoint(r.inputs)}
    return {r for r in (*dag.shardings, *near) if dag.model.trained(dag.model.by_id[r])}


def renamed(order: Precedence, halves: dict[NodeId, tuple[NodeId, ...]]) -> Precedence:
    def parts(names: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        return tuple(part for name in names for part in halves.get(name, (name,)))

    return replace(order, before=parts(order.before), after=parts(order.after))
