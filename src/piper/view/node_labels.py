"""What pages call a node: a pass by its name, a message by what it carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from piper.ir.dag import Dag
from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Kind,
    Node,
    Redistribute,
    Store,
    Totals,
    Transfer,
    Update,
    Way,
)
from piper.ir.values import Role
from piper.names import TOTALS_STREAM, ValueId
from piper.view.kinds import word

CARRIED = {
    Role.ACTIVATION: "activations",
    Role.SAVED: "saved activations",
    Role.CARRY: "saved activations",
    Role.GRADIENT: "gradients",
    Role.WEIGHT_GRADIENT: "gradients",
    Role.GRADIENT_SHARD: "gradients",
    Role.GRADIENT_SUM: "gradients",
    Role.WEIGHTS: "parameters",
    Role.NEW_WEIGHTS: "parameters",
    Role.WHOLE_WEIGHTS: "parameters",
    Role.OPTIMIZER: "optimizer state",
    Role.NEW_OPTIMIZER: "optimizer state",
}


def node_label(dag: Dag, node: Node) -> str:
    """A transfer is named by its sending end."""
    match node:
        case Compute():
            return node.id
        case Transfer():
            return f"send {payload(dag, node)}"
        case Collective():
            kind = "gather" if node.kind is Kind.ALL_GATHER else str(node.kind)
            return f"{kind} {payload(dag, node)}"
        case Exchange():
            return f"{'combine' if node.way is Way.BACK else 'dispatch'} {node.id}"
        case Redistribute():
            return f"{node.step} {node.id}"
        case Store() | Fetch():
            return f"{type(node).__name__.lower()} {payload(dag, node)}"
        case Update():
            return f"update {node.bucket}"
        case Totals():
            return word(TOTALS_STREAM)
        case _:
            assert_never(node)


def payload(dag: Dag, node: Node) -> str:
    """What a message carries, and of which pass it is the result, or of which parameters."""
    value = dag.values[node.reads[0][0]]
    if value.role not in CARRIED:
        return f"{value.role} message"
    made = set(sources(dag, node))
    owner = made.pop() if len(made) == 1 else value.bucket
    return f"{CARRIED[value.role]} of {owner}" if owner else CARRIED[value.role]


def sources(dag: Dag, node: Node) -> Iterator[str]:
    """The passes that compute what a node reads, also through other messages."""
    for name in (dag.producers[value] for total in node.reads for value in ends(dag, total)):
        before = dag.nodes[name]
        if isinstance(before, Compute):
            yield before.id
        elif not isinstance(before, Update):
            yield from sources(dag, before)


def ends(dag: Dag, total: tuple[ValueId, ...]) -> Iterator[ValueId]:
    return (value for value in total if value in dag.producers)
