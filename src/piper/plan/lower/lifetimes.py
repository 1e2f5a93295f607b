"""The sums that a device computes, and when it frees each buffer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from piper.ir.naming import sum_buffer
from piper.ir.nodes import Kind, Sum, Totals
from piper.ir.values import Role, Value
from piper.names import NodeId, ValueId
from piper.plan.lower.device_work import DeviceWork
from piper.plan.lower.message_starts import Receive

STATES = (Role.WEIGHTS, Role.OPTIMIZER)  # outlive the step, unless a copy was fetched
LASTING = (Role.NEW_WEIGHTS, Role.NEW_OPTIMIZER, Role.TOTALS)  # never freed by a plan


@dataclass(frozen=True)
class Sums:
    """The sums of a device: their buffers, and the sum that each value is part of."""

    names: dict[Sum, str]
    of: dict[str, str]


def local_sums(work: DeviceWork) -> Sums:
    nodes = chain(work.nodes, chain.from_iterable(work.starts.values()))
    names: dict[Sum, str] = {}
    for node in nodes:
        if not isinstance(node, Totals) and not isinstance(node, Receive):  # fast, of very many
            for total in node.reads:
                if len(total) > 1:
                    names[total] = sum_buffer(total[0])
    return Sums(names, {value: name for total, name in names.items() for value in total})


def is_kept(work: DeviceWork, name: ValueId, value: Value) -> bool:
    """What is new has the memory of the old. What was fetched in the step ends with it."""
    if value.role in STATES:
        return name not in work.dag.producers
    return value.role in LASTING


def endings(work: DeviceWork, sums: Sums, proofs: dict[NodeId, int]) -> dict[int, list[str]]:
    """Position -> buffers to free after it: after their last use, or when proved received."""
    last: dict[str, int] = {transfer.writes[0]: len(work.nodes) for transfer in work.gets.values()}
    last.update((node.writes[0], len(work.nodes)) for node in work.collectives)
    last.update((value, -1) for node in work.exchanges for value in node.writes)
    last.update((node.writes[0], -1) for _, node in work.stores)
    for position, node in enumerate(work.nodes):
        last.update(dict.fromkeys(node.writes, position))
        if isinstance(node, Totals):
            named = [sums.names.get(total, total[0]) for total in node.reads[1:]]
            last.update((name, position) for name in (*node.reads[0], *named) if name in last)
        else:
            for total, name in work.names(node):
                last[sums.names.get(total, name) if sums.names else name] = position
    for exchange in work.exchanges:
        arrived = work.arrived(exchange)
        read = [sums.names.get(total, name) for total, name in work.names(exchange)]
        for value in (*read, *exchange.writes):
            last[value] = max(last.get(value, 0), arrived)
    for gather in (node for node in work.collectives if node.kind is Kind.ALL_GATHER):
        done, shards = min(work.readers(gather), default=len(work.nodes)), gather.reads[0][0]
        last[shards] = max(last.get(shards, 0), done)  # if they were fetched
    for position, store in work.stores:
        value, until = store.reads[0][0], min(position + store.lag, len(work.nodes) - 1)
        memory = work.dag.values[value].state or value
        last[memory] = max(last.get(memory, 0), until)
    for transfer in work.sends:
        first = transfer.reads[0][0]
        buffer = sums.names.get(transfer.reads[0], work.dag.values[first].state or first)
        proof = proofs.get(transfer.id, len(work.nodes))
        last[buffer] = max(last.get(buffer, 0), proof)
    reductions = (node for node in work.collectives if node.kind is not Kind.ALL_GATHER)
    taken = {sums.names.get(node.reads[0], node.reads[0][0]) for node in reductions}
    ends: dict[int, list[str]] = {}
    for buffer, position in last.items():
        known = work.dag.values.get(ValueId(buffer))
        lasts = known is not None and is_kept(work, ValueId(buffer), known)
        if not (lasts or buffer in sums.of or buffer in taken):
            ends.setdefault(position, []).append(buffer)
    return ends
