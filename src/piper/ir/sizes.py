"""How many bytes nodes of the DAG move or write."""

from __future__ import annotations

from typing import assert_never

from piper.ir.dag import Dag
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


def node_bytes(dag: Dag, node: Node) -> int:
    """The bytes that a node moves, or that a computation writes."""
    match node:
        case Compute() | Update():
            return written_bytes(dag, node)
        case Exchange():
            return sum(dag.values[value].nbytes for value in node.rows)
        case Transfer() | Store() | Fetch():  # brings what it reads
            return dag.values[node.writes[0]].nbytes
        case Collective() | Redistribute() | Totals():
            read = sum(dag.values[parts[0]].nbytes for parts in node.reads if parts)
            return max(read, written_bytes(dag, node))
        case _:
            assert_never(node)


def written_bytes(dag: Dag, node: Node) -> int:
    return sum(dag.values[value].nbytes for value in node.writes if value in dag.values)
