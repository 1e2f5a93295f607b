"""The trace that the compiler predicted when it scheduled the DAG, if there is no better one."""

from __future__ import annotations

from collections.abc import Sequence

from piper.ir.by_device.local_dags import views
from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Kind, Node, Transfer
from piper.names import Device, NodeId
from piper.plan.analyse.trace import SIMULATED, Span, Trace
from piper.plan.instructions import Plan

Times = dict[NodeId, tuple[float, float]]


def expected_trace(
    dag: Dag, plans: Sequence[Plan], name: str = "as predicted by the compiler"
) -> Trace:
    """Every instruction of a node, at the predicted time of the node."""
    known = {plan.device: plan for plan in plans}
    found: dict[Device, tuple[Span, ...]] = {}
    for view in views(dag, tuple(known)):
        nodes, local = view.dag.nodes.values(), view.dag
        times = {node.id: when(local, node) for node in nodes if node.id in local.times}
        found.update((device, spans(known[device], times)) for device in view.devices)
    return Trace(name, SIMULATED, found)


def spans(plan: Plan, times: Times) -> tuple[Span, ...]:
    nodes = [NodeId(one.node) for one in plan.instructions]
    known = [(at, *times[node]) for at, node in enumerate(nodes) if node in times]
    return tuple(Span(at, start, start, end) for at, start, end in known)


def when(dag: Dag, node: Node) -> tuple[float, float]:
    """Start and end. Gathers were added after scheduling; they end when their reader starts."""
    start, _ = dag.times[node.id]
    seconds = duration(dag, node)
    if isinstance(node, Collective) and node.kind is Kind.ALL_GATHER:
        uses = [
            dag.times[user][0] for value in node.writes for user in dag.consumers.get(value, ())
        ]
        start = max(0.0, min(uses, default=seconds) - seconds)
    return start, start + seconds


def duration(dag: Dag, node: Node) -> float:
    """The predicted time. Messages take no time in the schedule, but have a transfer time."""
    start, end = dag.times.get(node.id, (0.0, 0.0))
    if isinstance(node, Transfer | Collective) and end == start:
        return sum(dag.transits.get(node.id, ()))
    return end - start
