"""Print a DAG: one line per node, the same text for the same DAG; `ir/text/parse.py` reads it back.

What follows from the model is not printed: the region and tags of a node that `naming` has named,
and values as they are before any pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import assert_never

from piper.ir.dag import Dag
from piper.ir.host_copies import HostCopies, Offloaded
from piper.ir.message_order import MessageOrder
from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Node,
    Precedence,
    Redistribute,
    Store,
    Sum,
    Tags,
    Totals,
    Transfer,
    Update,
)
from piper.ir.placement.residency import Residency
from piper.ir.training import step_values
from piper.ir.values import Value
from piper.names import BucketId, RegionId, ValueId, amount

STREAM = "pp"  # of what a region writes, unless it says otherwise


def text(dag: Dag) -> str:
    return "\n".join(lines(dag)) + "\n"


def lines(dag: Dag) -> Iterator[str]:
    split = "".join(f" {name}={n}" for name, n in dag.dimensions)
    scheduled = ", scheduled" if dag.sequence else ""
    size = f"{amount(len(dag.nodes), 'node')}, {amount(len(dag.model.regions), 'region')}"
    yield f"dag: {size}{split}{scheduled}"
    if dag.streams:
        yield f"streams: {', '.join(map(str, dag.streams))}"
    names = [dag.nodes[name] for name in dag.sequence] if dag.sequence else dag.nodes.values()
    for node in names:
        yield f"{describe(node)}  # {dag.makers.get(node.id, 'pass')}"
    yield from map(order_text, dag.precedences)
    yield from map(message_order_text, dag.message_orders)
    yield from settings(dag)
    yield from values(dag)


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
        case Transfer() | Exchange() | Redistribute() | Store() | Fetch() | Totals() | Update():
            return type(node).__name__.lower()
        case _:
            assert_never(node)


def where(node: Node) -> str:
    match node:
        case Transfer():
            return f"{list(node.source)} => {list(node.devices)} [{node.stream}]{tags(node.tags)}"
        case Exchange():
            at = elsewhere(node.devices, node.groups)
            return f"{groups(node.groups)} [{node.stream}]{at}, {node.way}{tags(node.tags)}"
        case Redistribute():
            at = elsewhere(node.devices, node.groups)
            onward = "" if node.onward == STREAM else f", then {node.onward}"
            return f"{groups(node.groups)} [{node.stream}]{at}, {node.step}{onward}"
        case Collective():
            at = elsewhere(node.devices, node.groups)
            sent = " ".join("+".join(map(str, message.tensors)) for message in node.messages)
            slot = "" if node.slot is None else f", buffer {node.slot}"
            return f"{groups(node.groups)} [{node.stream}]{at}, messages {sent}{slot}"
        case Compute():
            usual = STREAM if node.devices else None
            stream = "" if node.stream == usual else f" [{node.stream or ''}]"
            return f"{list(node.devices)}{stream}" if node.devices else "nowhere yet"
        case Store():
            return f"{list(node.devices)} [{node.stream}], lag {node.lag}{tags(node.tags)}"
        case Fetch():
            return f"{list(node.devices)} [{node.stream}]{tags(node.tags)}"
        case Totals() | Update():
            return str(list(node.devices)) if node.devices else "nowhere yet"
        case _:
            assert_never(node)


def groups(found: Sequence[tuple[int, ...]]) -> str:
    return " ".join(str(list(group)) for group in found)


def elsewhere(devices: tuple[int, ...], found: Sequence[tuple[int, ...]]) -> str:
    """The order of replicas, if it is not that of the groups."""
    return "" if devices == tuple(chain.from_iterable(found)) else f", replicas {list(devices)}"


def tags(found: Tags) -> str:
    return f" {{{' '.join(f'{key}={index}' for key, index in found)}}}" if found else ""


def total_text(total: Sum) -> str:
    return " + ".join(total)


def order_text(order: Precedence) -> str:
    before, after = ", ".join(order.before), ", ".join(order.after)
    how = f"{', loosely' if order.loose else ''}{', partly' if order.partial else ''}"
    return f"before{how}: {before} -> {after}  # {order.maker}"


def message_order_text(order: MessageOrder) -> str:
    return f"order: {' then '.join(map(str, order.slots))}  # {order.maker}"


def settings(dag: Dag) -> Iterator[str]:
    """What `Replicate`, `Shard` and `Offload` asked for."""
    if dag.replicated:
        yield f"replicated: {', '.join(dag.replicated)}"
    for region, cut in dag.shardings.items():
        yield f"experts {region} on {groups(cut.groups)} [{cut.stream}]"
    for region, division in dag.divisions.items():
        for what, axis in (("tokens", division.tokens), ("weights", division.weights)):
            if axis is not None:
                yield f"{what} {region} on {groups(axis.groups)} [{axis.stream}]"
    yield from offloads(dag)
    shared: dict[Residency, list[BucketId]] = {}
    for bucket, how in dag.residencies.items():
        shared.setdefault(how, []).append(bucket)
    for how, buckets in shared.items():
        rest = " ".join(f"{f.name}={getattr(how, f.name)}" for f in fields(how)[1:])
        yield f"buckets {', '.join(buckets)} on {groups(how.groups)}: {rest}"


def offloads(dag: Dag) -> Iterator[str]:
    alike: dict[tuple[Offloaded, HostCopies], list[RegionId]] = {}
    for (what, region), how in dag.offloads.items():
        alike.setdefault((what, how), []).append(region)
    for (what, how), regions in alike.items():
        rest = " ".join(f"{f.name}={getattr(how, f.name)}" for f in fields(how))
        yield f"offload {what} of {', '.join(regions)}: {rest}"


def values(dag: Dag) -> Iterator[str]:
    """Values that differ from those of the model. Equal values share a line."""
    usual = step_values(dag.model, dag.dimensions)
    found: dict[Value, list[ValueId]] = {}
    for name, value in dag.values.items():
        if usual.get(name) != value:
            found.setdefault(value, []).append(name)
    for value, names in found.items():
        specs = ", ".join(map(str, value.specs))
        yield f"value {value.role} ({specs}){details(value)}: {', '.join(names)}"


def details(value: Value) -> str:
    """The fields that do not have their default value."""
    special = [(f.name, getattr(value, f.name)) for f in fields(Value)[2:]]
    usual = {f.name: f.default for f in fields(Value)}
    shown = [name if v is True else f"{name}={v}" for name, v in special if v != usual[name]]
    return "".join(f" {one}" for one in shown)
