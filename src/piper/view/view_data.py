"""The data that pages and pictures show of one strategy or run, as columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from piper.ir.by_device.local_dags import shared_nodes
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
from piper.ir.sizes import node_bytes
from piper.names import BI, TOTALS_STREAM, B, Device, NodeId
from piper.plan.analyse.memory import holders, lasting, peak, timeline
from piper.plan.analyse.trace import Trace
from piper.plan.instructions import Instruction, Plan, line
from piper.view.expected_trace import duration, expected_trace
from piper.view.node_labels import node_label
from piper.view.reports.recomputation import node_text

Columns = Mapping[str, list[Any]]

DEVICES = 64  # shown at most
LARGEST = 12  # buffers that are listed at the peak
OPTIMIZER_STATE = 2.0  # times the parameters: Adam
CODED = (
    "kind", "region", "phase", "tags", "stage", "microbatch", "maker", "source", "stream", "text",
    "recomputes", "group",
)  # fmt: skip  # columns of repeated words


@dataclass(frozen=True, slots=True)
class DeviceView:
    """The instructions and the memory of one device."""

    device: Device
    instructions: Columns  # kind, stream, node (or -1), text, waits, group
    memory: Columns  # at (the instruction), then bytes by kind
    lasting: Mapping[str, int]  # bytes that outlive the step
    peak: Mapping[str, Any]  # total, at, held, and the largest buffers: name, kind, bytes


@dataclass(frozen=True, slots=True)
class ViewData:
    """A compiled strategy with predicted or measured steps."""

    name: str
    nodes: Columns
    orders: Columns  # temporal edges between groups of nodes: before, after, maker
    devices: tuple[DeviceView, ...]
    traces: tuple[Trace, ...]
    left_out: int = 0  # devices that are not shown
    streams: Mapping[str, str] = field(
        default_factory=dict
    )  # stream -> label, if it has SMs or a priority
    notes: tuple[str, ...] = ()  # costs that were not measured, or how messages slow compute
    machine: str = ""  # that was measured or simulated

    def label(self, stream: str) -> str:
        """A stream, with its SMs and priority if the strategy sets them."""
        return self.streams.get(stream, stream)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Repeated words are written once and then referred to by number."""
        words: dict[str, int] = {}
        return {
            "name": self.name,
            "left_out": self.left_out,
            "streams": dict(self.streams),
            "notes": list(self.notes),
            "machine": self.machine,
            "nodes": coded(self.nodes, words),
            "orders": coded(self.orders, words),
            "devices": [
                {
                    "device": one.device,
                    "instructions": coded(one.instructions, words),
                    "memory": dict(one.memory),
                    "lasting": dict(one.lasting),
                    "peak": dict(one.peak),
                }
                for one in self.devices
            ],
            "traces": [trace.to_dict() for trace in self.traces],
            "coded": list(CODED),
            "words": list(words),
        }

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> ViewData:
        words = found["words"]
        devices = [
            DeviceView(
                one["device"],
                decoded(one["instructions"], words),
                one["memory"],
                one["lasting"],
                one["peak"],
            )
            for one in found["devices"]
        ]
        return ViewData(
            found["name"],
            decoded(found["nodes"], words),
            decoded(found["orders"], words),
            tuple(devices),
            tuple(map(Trace.from_dict, found["traces"])),
            found["left_out"],
            found.get("streams", {}),
            tuple(found.get("notes", ())),
            found.get("machine", ""),
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> ViewData:
        return ViewData.from_dict(json.loads(text))

    def with_traces(self, traces: Iterable[Trace]) -> ViewData:
        """The same strategy with other traces, of the devices that are shown."""
        shown = {one.device for one in self.devices}
        return replace(self, traces=tuple(only(trace, shown) for trace in traces))


def view_data(
    name: str,
    dag: Dag,
    plans: Sequence[Plan],
    traces: Sequence[Trace] = (),
    most: int = DEVICES,
    notes: Sequence[str] = (),
    machine: str = "",
    optimizer: float = OPTIMIZER_STATE,
) -> ViewData:
    """The data of a compiled strategy. Without a trace, it has the compiler's predicted times."""
    shown = different_first(plans, most)
    number = {node: k for k, node in enumerate(dag.nodes)}
    index = {copy: number[node] for copy, node in shared_nodes(dag).items()}
    data = ViewData(
        name,
        node_columns(dag, index),
        order_columns(dag, index),
        tuple(device_view(dag, plan, index, optimizer) for plan in shown),
        (),
        max(len(plans), len(dag.devices)) - len(shown),
        {share.stream: str(share) for share in dag.streams},
        tuple(notes),
        machine,
    )
    return data.with_traces(traces or (expected_trace(dag, shown),))


def different_first(plans: Sequence[Plan], most: int) -> list[Plan]:
    """At most so many plans, one of each kind first, so that every pipeline stage is shown."""
    if len(plans) <= most:
        return list(plans)
    alike: dict[tuple[str, ...], list[Plan]] = {}
    for plan in plans:
        nodes = tuple(one.node for one in plan.instructions)
        alike.setdefault(nodes, []).append(plan)
    ranked = [(k, p.device, p) for group in alike.values() for k, p in enumerate(group)]
    return sorted((plan for _, _, plan in sorted(ranked)[:most]), key=lambda plan: plan.device)


def only(trace: Trace, shown: set[Device]) -> Trace:
    return replace(trace, spans={d: spans for d, spans in trace.spans.items() if d in shown})


def node_columns(dag: Dag, index: Mapping[NodeId, int]) -> Columns:
    """One entry for each node. `region` is what it computes, or communicates for."""
    regions = regions_of_nodes(dag)
    found = [dag.model.by_id.get(regions[node]) for node in dag.nodes]  # type: ignore[call-overload]
    nodes = list(dag.nodes.values())
    return {
        "id": list(dag.nodes),
        "label": [node_label(dag, node) for node in nodes],
        "kind": [kind_of_node(node) for node in nodes],
        "region": [regions[node.id] for node in nodes],
        "phase": [str(node.phase) if isinstance(node, Compute) else "" for node in nodes],
        "tags": [" ".join(f"{key}={value}" for key, value in node.tags) for node in nodes],
        "stage": [str(node.tags[0][1]) if node.tags else "" for node in nodes],
        "microbatch": [microbatch_text(node) for node in nodes],
        "maker": [str(dag.makers.get(node.id) or made_by(node)) for node in nodes],
        "source": [region.source if region else "" for region in found],
        "bytes": [node_bytes(dag, node) for node in nodes],
        "flops": [
            region.flops.get(node.phase, 0) if region and isinstance(node, Compute) else 0
            for node, region in zip(nodes, found, strict=True)
        ],
        "recomputes": [
            node_text(region.recomputes)
            if region and isinstance(node, Compute) and node.phase in (B, BI)
            else ""
            for node, region in zip(nodes, found, strict=True)
        ],
        "expected": [round(duration(dag, node), 9) for node in nodes],
        "data": [list(dict.fromkeys(index[p] for p in dag.predecessors(node))) for node in nodes],
    }


def microbatch_text(node: Node) -> str:
    part = node.microbatch if isinstance(node, Compute) else None
    return "" if part is None else str(part)


def regions_of_nodes(dag: Dag) -> dict[NodeId, str]:
    """The region of each node. Communication belongs to the region before it, or else after it."""
    found: dict[NodeId, str] = {}
    order = dag.sequence or tuple(dag.nodes)
    for name in order:
        node = dag.nodes[name]
        before = (found[p] for p in dag.predecessors(node) if found.get(p))
        found[name] = node.region if isinstance(node, Compute) else next(before, "")
    for name in reversed(order):
        users = (u for value in dag.nodes[name].writes for u in dag.consumers.get(value, ()))
        found[name] = found[name] or next((found[user] for user in users if found[user]), "")
    return found


def kind_of_node(node: Node) -> str:
    match node:
        case Compute():
            return str(node.phase)
        case Transfer():
            return "send"
        case Collective():
            return "gather" if node.kind == "all-gather" else str(node.kind)
        case Exchange():
            return "exchange"
        case Redistribute():
            return str(node.step)
        case Store() | Fetch():
            return type(node).__name__.lower()
        case Update():
            return "update"
        case Totals():
            return TOTALS_STREAM
        case _:
            assert_never(node)


def made_by(node: Node) -> str:
    """The pass that makes such nodes, if the node itself does not say."""
    match node:
        case Transfer():
            return "transfers (a pass, because of place)"
        case Collective():
            return "reductions and gathers (passes, because of replicate)"
        case Exchange():
            return "token all-to-all (a pass, because of shard)"
        case Redistribute():
            return "conversions (a pass, because of shard)"
        case Store() | Fetch():
            return "offload (a pass, because of offload)"
        case Compute() | Update() | Totals():
            return "capture"
        case _:
            assert_never(node)


def order_columns(dag: Dag, index: Mapping[NodeId, int]) -> Columns:
    return {
        "before": [[index[node] for node in order.before] for order in dag.precedences],
        "after": [[index[node] for node in order.after] for order in dag.precedences],
        "maker": [str(order.maker) for order in dag.precedences],
    }


def device_view(dag: Dag, plan: Plan, index: Mapping[NodeId, int], optimizer: float) -> DeviceView:
    moments, worst = timeline(dag, plan), peak(dag, plan, optimizer)
    kinds = dict.fromkeys(kind for moment in moments for kind in moment.held)
    memory = {kind: [moment.held.get(kind, 0) for moment in moments] for kind in kinds}
    largest = [list(row) for row in holders(dag, plan, worst.at)[:LARGEST]]
    return DeviceView(
        plan.device,
        instruction_columns(plan, index),
        {"at": [moment.at for moment in moments], **memory},
        dict(lasting(dag, plan, optimizer)),
        {"total": worst.total, "at": worst.at, "held": dict(worst.held), "largest": largest},
    )


def instruction_columns(plan: Plan, index: Mapping[NodeId, int]) -> Columns:
    ones = plan.instructions
    return {
        "kind": [one.kind for one in ones],
        "stream": [one.stream for one in ones],
        "node": [index.get(NodeId(one.node), -1) for one in ones],
        "text": [line(one) for one in ones],
        "waits": [list(one.waits) for one in ones],
        "group": [group_text(one, plan.device) for one in ones],
    }


def group_text(one: Instruction, device: Device) -> str:
    """The devices that take part in a message, in words that are the same on all of them."""
    met = one.communicator(device)
    return " ".join(map(str, met.members)) if met else ""


def coded(columns: Columns, words: dict[str, int]) -> dict[str, list[Any]]:
    """Columns of words as positions in the list of all words.

    >>> words: dict[str, int] = {}
    >>> coded({"kind": ["F", "B", "F"], "node": [7, 8, 9]}, words), list(words)
    ({'kind': [0, 1, 0], 'node': [7, 8, 9]}, ['F', 'B'])
    """
    return {
        name: [words.setdefault(word, len(words)) for word in row] if name in CODED else list(row)
        for name, row in columns.items()
    }


def decoded(columns: Columns, words: Sequence[str]) -> dict[str, list[Any]]:
    return {
        name: [words[k] for k in row] if name in CODED else list(row)
        for name, row in columns.items()
    }
