"""Add up loss and gradient norm over all devices, once per step."""

from __future__ import annotations

from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.nodes import Node, Totals, Update
from piper.ir.values import TensorSpec, Value
from piper.names import NodeId, ValueId

TOTALS = ValueId("totals")


def insert_totals(dag: Dag, clip: bool) -> Dag:
    """With clipping, every update waits for the norm over all devices.

    rewrite:
        B -> Update
        -->
        B -> Update            B -> Totals          and Totals -> Update when gradients are clipped
    """
    parts = tuple(node.reads[0] for node in dag.nodes.values() if isinstance(node, Update))
    losses = tuple((value,) for value in loss_values(dag))
    totals = Totals(id=NodeId("totals"), reads=losses + parts, writes=(TOTALS,), devices=dag.devices)
    new: list[Node] = [totals]
    if clip:
        new += [
            replace(node, reads=(*node.reads, (TOTALS,)))
            for node in dag.nodes.values()
            if isinstance(node, Update)
        ]
    return dag.with_values({TOTALS: Value((TensorSpec((2,), "float64"),))}).with_nodes(new)


def loss_values(dag: Dag) -> list[ValueId]:
    loss = dag.model.loss
    if not dag.dimensions:
        return [loss]
    return [ValueId(f"{loss}@{part}") for part in range(dag.dimensions[0][1])]
