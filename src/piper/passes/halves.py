"""Cut backwards in two where tokens wait for the first half: the second one hides their journey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.nodes import Node, Precedence
from piper.ir.training import split_backward
from piper.names import B, NodeId, RegionId

HALVES = Maker("halves")


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
    makers = {name: dag.makers.get(name, HALVES) for name in nodes}
    halves = {name: tuple(part.id for part in pair) for name, pair in cut.items()}
    orders = tuple(renamed(dag.precedences, halves))
    return replace(dag, nodes=nodes, makers=makers, precedences=orders)


def beside_experts(dag: Dag) -> set[RegionId]:
    """Sharded regions, and regions that read what they write: both send gradients on a journey."""
    away = {v for r in dag.shardings for v in dag.model.by_id[r].outputs}
    near = {r.id for r in dag.model.regions if not away.isdisjoint(r.inputs)}
    return {r for r in (*dag.shardings, *near) if dag.model.trained(dag.model.by_id[r])}


def renamed(
    orders: Sequence[Precedence], halves: dict[NodeId, tuple[NodeId, ...]]
) -> Iterator[Precedence]:
    """Halves in place of what was cut. Where an order is loose, the second ones need not be done
    before what comes next, but before what comes after that."""
    after: dict[tuple[NodeId, ...], list[Precedence]] = {}
    for order in orders:
        after.setdefault(order.before, []).append(order)

    def parts(names: tuple[NodeId, ...], which: slice = slice(None)) -> tuple[NodeId, ...]:
        return tuple(part for name in names for part in halves.get(name, (name,))[which])

    for order in orders:
        late = tuple(halves[name][1] for name in order.before if name in halves)
        if order.loose and late:
            yield replace(order, before=parts(order.before, slice(1)), after=parts(order.after))
            for one in after.get(order.after, ()):
                yield replace(order, before=late, after=parts(one.after))
        else:
            yield replace(order, before=parts(order.before), after=parts(order.after))
