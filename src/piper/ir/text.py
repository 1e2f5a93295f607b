"""Print a DAG: one line per node, the same text for the same DAG."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Compute, Exchange, Node, Sum, Totals, Transfer, Update


def text(dag: Dag) -> str:
    return "\n".join(lines(dag)) + "\n"


def lines(dag: Dag) -> Iterator[str]:
    split = " ".join(f"{name}={n}" for name, n in dag.dimensions)
    yield f"dag: {len(dag.nodes)} nodes, {len(dag.model.regions)} regions {split}".rstrip()
    if dag.streams:
        yield f"streams: {', '.join(map(str, dag.streams))}"
    names = [dag.nodes[name] for name in dag.sequence] if dag.sequence else dag.nodes.values()
    for node in names:
        yield f"{describe(node)}  # {dag.makers.get(node.id, 'pass')}"
    for order in dag.precedences:
        before, after = ", ".join(order.before), ", ".join(order.after)
        yield f"before: {before} -> {after}  # {order.maker}"


def describe(node: Node) -> str:
    kind = kind_of(node)
    reads = ", ".join(map(total_text, node.reads))
    return f"{kind:8} {node.id} on {where(node)}: ({reads}) -> {', '.join(node.writes)}"


def kind_of(node: Node) -> str:
    match node:
        case Compute():
            return node.phase
        case Collective():
            return node.kind
        case Transfer() | Exchange() | Totals() | Update():
            return type(node).__name__.lower()
        case _:
            assert_never(node)


def where(node: Node) -> str:
    if isinstance(node, Transfer):
        return f"{list(node.source)} => {list(node.devices)} [{node.stream}]"
    if isinstance(node, Collective | Exchange):
        groups = " ".join(str(list(group)) for group in node.groups)
        return f"{groups} [{node.stream}]"
    return str(list(node.devices)) if node.devices else "nowhere yet"


def total_text(total: Sum) -> str:
    return " + ".join(total)
