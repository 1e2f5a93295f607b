"""Rules about messages, updates, and the loss and norm all-reduce: they fit what they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

from piper.errors import BUG, Problem
from piper.ir.dag import Dag
from piper.ir.flat_layout import Message, shard_specs
from piper.ir.naming import weights
from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Kind,
    Redistribute,
    Store,
    Sum,
    Totals,
    Transfer,
    Update,
    Way,
)
from piper.ir.rules.shape import Specs, meaning, show
from piper.ir.sharding import share_of
from piper.ir.training import ALL_TOTALS
from piper.ir.values import Role, TensorSpec, Value
from piper.names import BucketId, RegionId, ValueId, amount


def every_message_fits_what_it_carries(dag: Dag) -> Iterator[Problem]:
    """What arrives is what was sent: the same value, with all its parts, in the right sizes."""
    for node in dag.nodes.values():
        if isinstance(node, Compute) or (isinstance(node, Transfer) and brings_one(dag, node)):
            continue  # nearly all nodes
        for fault in faults(dag, node):
            yield Problem(f"{node.id} {fault}", BUG)


def brings_one(dag: Dag, node: Transfer) -> bool:
    """Whether it sends one value unchanged."""
    if len(node.reads) != 1 or len(node.writes) != 1 or len(node.reads[0]) != 1:
        return False
    return dag.values[node.reads[0][0]] is dag.values[node.writes[0]]


def faults(
    dag: Dag,
    node: Transfer | Collective | Exchange | Redistribute | Store | Fetch | Totals | Update,
) -> Iterator[str]:
    match node:
        case Transfer():
            yield from transfer_faults(dag, node)
        case Collective():
            yield from collective_faults(dag, node)
        case Exchange():
            yield from exchange_faults(dag, node)
        case Store() | Fetch():
            yield from host_copy_faults(dag, node)
        case Totals() | Update() | Redistribute():
            pass  # other rules
        case _:
            assert_never(node)


def transfer_faults(dag: Dag, node: Transfer) -> Iterator[str]:
    if len(node.reads) != 1 or len(node.writes) != 1:
        yield counted(node, 1, 1)
        return
    total, new = node.reads[0], dag.values[node.writes[0]]
    if new.role is Role.NEW_WEIGHTS:
        yield from copy_faults(dag, total, node.writes[0])
    else:
        yield from sum_faults(dag, total, node.writes[0])


def host_copy_faults(dag: Dag, node: Store | Fetch) -> Iterator[str]:
    """The same value in other memory: of the host after a store, of the device after a fetch."""
    if len(node.reads) != 1 or len(node.writes) != 1:
        yield counted(node, 1, 1)
        return
    total, new = node.reads[0], dag.values[node.writes[0]]
    old, is_stored = dag.values[total[0]], isinstance(node, Store)
    if len(total) != 1 or replace(old, host=new.host, state=new.state) != new:
        yield f"reads {text(total)} as {node.writes[0]} (expected the same value)"
    elif (old.host, new.host) != (not is_stored, is_stored):
        yield f"reads {text(total)} and writes {node.writes[0]}, which is not where it copies to"


def copy_faults(dag: Dag, total: Sum, copy: ValueId) -> Iterator[str]:
    """New parameters are sent to the devices that have a copy of the old ones."""
    old, new = dag.values[total[0]], dag.values[copy]
    state = dag.values[new.state] if new.state else None
    same = len(total) == 1 and meaning(old) == meaning(new) and old.specs == new.specs
    if not same or state is None or not state.copy or state.bucket != new.bucket:
        yield f"reads {text(total)} as {copy} (expected the new parameters of {new.bucket})"


def sum_faults(dag: Dag, total: Sum, brought: ValueId) -> Iterator[str]:
    """All parts of a sum belong to one value. Its reader checks that no part is missing."""
    new = dag.values[brought]
    for value in total:
        old = dag.values[value]
        if same_sum(old) != same_sum(new) or old.experts != new.experts:
            yield f"reads {value} as a part of {brought} (expected {thing(new)})"
        elif old.specs != new.specs:
            yield misfit(value, old.specs, brought, new.specs)


def same_sum(value: Value) -> tuple[object, ...]:
    """What all parts of a sum have in common. Gradients may come from several regions."""
    added = value.role in (Role.GRADIENT, Role.WEIGHT_GRADIENT)
    return value.role, value.base, None if added else value.region, value.bucket


def collective_faults(dag: Dag, node: Collective) -> Iterator[str]:
    if len(node.reads) != 1 or len(node.writes) != 1:
        yield counted(node, 1, 1)
        return
    new, total = dag.values[node.writes[0]], node.reads[0]
    reads, writes = ROLES[node.kind]
    for value in total:
        old = dag.values[value]
        if old.role not in reads or old.bucket != new.bucket or old.copy:
            yield f"reads {value} as a part of {node.writes[0]} (expected {thing(new)})"
    if new.role is not writes or (node.kind is Kind.ALL_GATHER and len(total) > 1):
        yield f"writes {node.writes[0]} (expected {writes} of {new.bucket})"
    yield from size_faults(dag, node)


GRADIENTS = (Role.WEIGHT_GRADIENT, Role.GRADIENT_SHARD)
ROLES = {
    Kind.ALL_REDUCE: (GRADIENTS, Role.GRADIENT_SUM),
    Kind.REDUCE_SCATTER: ((Role.WEIGHT_GRADIENT,), Role.GRADIENT_SHARD),
    Kind.ALL_GATHER: ((Role.WEIGHTS,), Role.WHOLE_WEIGHTS),
}


def size_faults(dag: Dag, node: Collective) -> Iterator[str]:
    """A reduce-scatter writes shards of its messages, an all-gather reads them."""
    new = dag.values[node.writes[0]]
    gathers, scatters = node.kind is Kind.ALL_GATHER, node.kind is Kind.REDUCE_SCATTER
    whole = new.specs
    if new.bucket and (gathers or scatters):
        whole = dag.held(new.bucket) if gathers else dag.held_gradients(new.bucket)
    ways = len(node.groups[0]) if gathers or scatters else 1
    shard = shard_specs(node.messages, ways) if gathers or scatters else whole
    wanted = (shard, whole) if gathers else (whole, shard)
    if not covers(node.messages, whole, ways):
        yield f"sends messages that do not make up {node.writes[0]}, of {show(whole)}"
    for value in node.reads[0]:
        if dag.values[value].specs != wanted[0]:
            yield misfit(value, dag.values[value].specs, node.writes[0], wanted[0])
    if new.specs != wanted[1]:
        yield f"writes {node.writes[0]} of {show(new.specs)} (expected {show(wanted[1])})"


def covers(layout: Sequence[Message], specs: Specs, ways: int) -> bool:
    """Whether every tensor is in one message, and messages are as long as their tensors."""
    tensors = sorted(k for message in layout for k in message.tensors)
    return tensors == list(range(len(specs))) and all(
        message.numel == sum(specs[k].numel for k in message.tensors)
        and message.padded == -(-message.numel // ways) * ways
        and all(specs[k].dtype == message.dtype for k in message.tensors)
        for message in layout
    )


def exchange_faults(dag: Dag, node: Exchange) -> Iterator[str]:
    """Tokens arrive as they were sent, and so do their counts or their route."""
    rows = len(node.reads) - 1
    if rows < 1 or len(node.writes) != (rows + 2 if node.way is Way.COUNTED else rows):
        yield counted(node, 2, 3 if node.way is Way.COUNTED else 1)
        return
    read = {v: dag.values[v] for v in (total[0] for total in node.reads)}
    region = experts_of([*(dag.values[v] for v in node.writes), *read.values()])
    for total, new in zip(node.reads[:rows], node.writes, strict=False):
        yield from row_faults(dag, node, total, new, region)
    yield from route_faults(dag, node, region)
    parts = {dag.origins.part(v) for total in node.reads for v in dag.origins.sources(total)}
    if len(parts) > 1:
        yield f"reads values of several microbatches for {region} (expected one)"


def experts_of(values: Sequence[Value]) -> RegionId | None:
    return next((value.experts for value in values if value.experts), None)


def row_faults(
    dag: Dag, node: Exchange, total: Sum, new: ValueId, region: RegionId | None
) -> Iterator[str]:
    back, arrived = node.way is Way.BACK, dag.values[new]
    if arrived.experts != (None if back else region):
        yield f"writes {new} for {region} (expected it {'at home' if back else 'at its experts'})"
    for value in total:
        old = dag.values[value]
        if old.base != arrived.base or old.experts != (region if back else None):
            yield f"reads {value} as {new} for {region} (expected {thing(arrived)})"
        elif old.specs != arrived.specs:
            yield misfit(value, old.specs, new, arrived.specs)


def route_faults(dag: Dag, node: Exchange, region: RegionId | None) -> Iterator[str]:
    if len(node.reads[-1]) != 1 or region is None or region not in dag.shardings:
        yield f"reads {text(node.reads[-1])} for {region} (expected one value, to share experts)"
        return
    last = node.reads[-1][0]
    known, route = dag.values[last], dag.values[node.writes[-1]]
    if node.way is not Way.COUNTED:
        if (known.role, known.region) != (Role.ROUTE, region):
            yield f"reads {last} as the route of {region}"
        return
    there = dag.values[node.writes[-2]]
    counts = TensorSpec(known.specs[0].shape, "int64")
    if (route.role, route.region, route.specs) != (Role.ROUTE, region, (counts, counts)):
        yield f"writes {node.writes[-1]} as the route of {region}"
    if there.base != known.base or there.experts != region:
        yield f"reads {last} as {node.writes[-2]} for {region} (expected {thing(there)})"
    elif there.specs != (share_of(known.specs[0], dag.shardings[region].ways),):
        yield misfit(last, known.specs, node.writes[-2], there.specs)


def every_update_has_all_gradients(dag: Dag) -> Iterator[Problem]:
    """An update reads its bucket's gradients from every region and microbatch.

    The loss and norm all-reduce reads the same gradients, and every loss.
    """
    steps = [node for node in dag.nodes.values() if isinstance(node, Update)]
    uses: dict[BucketId, list[RegionId]] = {}
    for region in dag.model.regions:
        for bucket in dag.model.trained(region):
            uses.setdefault(bucket, []).append(region.id)
    clipped = any(is_clipped(dag, step) for step in steps)
    for step in steps:
        for fault in update_faults(dag, step, uses.get(step.bucket, []), clipped):
            yield Problem(f"{step.id} {fault}", BUG)
    for node in dag.nodes.values():
        if isinstance(node, Totals):
            for fault in totals_faults(dag, node, steps):
                yield Problem(f"{node.id} {fault}", BUG)


def update_faults(dag: Dag, node: Update, regions: list[RegionId], clipped: bool) -> Iterator[str]:
    moved = any(dag.values[value].role is Role.NEW_OPTIMIZER for value in node.writes[1:])
    fetches = is_offloaded(dag, node.bucket)
    if len(node.reads) != 1 + clipped + fetches + moved or len(node.writes) != 1 + moved:
        yield counted(node, 1 + clipped + fetches + moved, 1 + moved)
        return
    if moved:
        yield from optimizer_faults(dag, node)
    if fetches and node.reads[1 + clipped] != (dag.values[node.writes[0]].state,):
        yield f"reads {text(node.reads[1 + clipped])} as the parameters that it changes"
    new, bucket = dag.values[node.writes[0]], node.bucket
    state = dag.values[new.state] if new.state else None
    right = (Role.NEW_WEIGHTS, bucket)
    if state is None or state.copy or state.host or (new.role, new.bucket) != right:
        yield f"writes {node.writes[0]} (expected the new parameters of {bucket})"
        return
    if new.specs != state.specs:
        yield f"writes {node.writes[0]} of {show(new.specs)} (expected {show(state.specs)})"
    wanted = dag.model.buckets[bucket].gradients(state.specs)
    for value in node.reads[0]:
        if dag.values[value].specs != wanted:
            yield misfit(value, dag.values[value].specs, f"the gradient of {bucket}", wanted)
    yield from gradient_faults(dag, node, regions)
    if clipped and (len(node.reads[1]) != 1 or dag.values[node.reads[1][0]].role != Role.TOTALS):
        yield f"reads {text(node.reads[1])} as the norm that clips {bucket}"


def is_offloaded(dag: Dag, bucket: BucketId) -> bool:
    """Whether its parameters are in host memory."""
    return dag.values[weights(bucket)].host


def is_clipped(dag: Dag, node: Update) -> bool:
    return any(dag.values[total[0]].role is Role.TOTALS for total in node.reads[1:])


def optimizer_faults(dag: Dag, node: Update) -> Iterator[str]:
    """Optimizer state that is copied: of this bucket, on the device, changed in place."""
    (old, *more), new = node.reads[-1], dag.values[node.writes[1]]
    known = dag.values[old]
    right = replace(known, role=Role.NEW_OPTIMIZER, state=old)
    if more or known.role is not Role.OPTIMIZER or known.host or known.bucket != node.bucket:
        yield f"reads {text(node.reads[-1])} as the optimizer state of {node.bucket}"
    elif new != right:
        yield f"writes {node.writes[1]} (expected the new optimizer state of {node.bucket})"


def gradient_faults(dag: Dag, node: Update, regions: list[RegionId]) -> Iterator[str]:
    found: dict[tuple[RegionId | None, int | None], ValueId] = {}
    for value in dag.origins.sources(node.reads[0]):
        known = dag.values[value]
        key = known.region, dag.origins.microbatch.get(value)
        if (known.role, known.bucket) != (Role.WEIGHT_GRADIENT, node.bucket) or key in found:
            yield f"reads {value} as a part of the gradient of {node.bucket} (expected each once)"
        found[key] = value
    count = microbatches(dag)
    some = {name: dag.model.microbatches(dag.model.by_id[name], count) for name in regions}
    wanted = ((region, part) for region, parts in some.items() for part in parts)
    for region, part in () if len(found) == sum(map(len, some.values())) else wanted:
        if (region, part) not in found:
            yield f"misses the gradient of {node.bucket} from {region} in microbatch {part}"


def totals_faults(dag: Dag, node: Totals, steps: Sequence[Update]) -> Iterator[str]:
    if len(node.reads) != 1 + len(steps):
        wanted = ["the loss", *(f"the gradient of {step.bucket}" for step in steps)]
        found = f"{amount(len(node.reads), 'value')} for {', '.join(node.writes)}"
        yield f"reads {found} (expected {', '.join(wanted)})"
        return
    for step, total in zip(steps, node.reads[1:], strict=True):
        if (total,) != step.reads[:1]:
            yield f"reads {text(total)} as the gradient of {step.bucket} (unlike its update)"
    losses = node.reads[0]
    loss = (Role.ACTIVATION, dag.model.loss, None, None)
    strange = [value for value in losses if meaning(dag.values[value]) != loss]
    parts = [dag.origins.part(value) for value in losses]
    if strange or sorted(p or 0 for p in parts) != list(range(microbatches(dag))):
        yield f"reads {text(losses)} as losses (expected one of each microbatch)"
    if [dag.values[value] for value in node.writes] != [ALL_TOTALS]:
        yield f"writes {', '.join(node.writes)} (expected the loss and the norm)"


def microbatches(dag: Dag) -> int:
    return dag.dimensions[0][1] if dag.dimensions else 1


def counted(
    node: Transfer | Collective | Exchange | Store | Fetch | Update, reads: int, writes: int
) -> str:
    found = f"reads {amount(len(node.reads), 'value')} and writes {len(node.writes)}"
    return f"{found}: {', '.join(node.writes)} (expected {reads} and {writes})"


def misfit(value: ValueId, specs: Specs, name: str, wanted: Specs) -> str:
    return f"reads {value} of {show(specs)} as a part of {name} (expected {show(wanted)})"


def thing(value: Value) -> str:
    if value.bucket:
        return f"the {value.role} of the bucket {value.bucket}"
    return f"the {value.role} of {value.base}" if value.base else f"the {value.role}"


def text(total: Sum) -> str:
    return " + ".join(total)
