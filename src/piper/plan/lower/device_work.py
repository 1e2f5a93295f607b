"""What each device takes part in, in order: work it does, values it sends, values it gets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import assert_never

from piper.ir.dag import Dag
from piper.ir.naming import replica_buffer
from piper.ir.nodes import Collective, Compute, Exchange, Kind, Node, Sum, Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.ir.replicas import Replicas, replicas
from piper.ir.roles import Present
from piper.ir.values import LOADED
from piper.names import Device, NodeId, ValueId

Work = Compute | UpdateNode | Totals
Start = Transfer | Collective | Exchange  # goes on by itself
EARLIEST = 12  # pieces of work that a receive may be ahead of its use


@dataclass
class Row:
    """One device's share of the sequence. Positions count its work. Lists of what it starts are
    there once all of it is in."""

    dag: Dag
    device: Device
    replicas: Replicas
    work: list[Work] = field(default_factory=list)
    position: dict[NodeId, int] = field(default_factory=dict)
    starts: dict[int, list[Start]] = field(default_factory=dict)  # after this much work
    started: dict[NodeId, int] = field(default_factory=dict)  # collectives: after how much work
    gets: dict[NodeId, Transfer] = field(default_factory=dict)
    uses: dict[NodeId, int | None] = field(default_factory=dict)  # first work that reads it
    posts: dict[float, list[Transfer]] = field(default_factory=dict)  # before this work; halves:
    # with what starts there

    def start(self, node: Start) -> None:
        """It starts when all work so far is done."""
        self.starts.setdefault(len(self.work), []).append(node)

    @cached_property
    def sends(self) -> list[Transfer]:
        nodes = chain.from_iterable(self.starts.values())
        return [node for node in nodes if isinstance(node, Transfer)]

    @cached_property
    def collectives(self) -> list[Collective]:
        nodes = chain.from_iterable(self.starts.values())
        return [node for node in nodes if isinstance(node, Collective)]

    @cached_property
    def exchanges(self) -> list[Exchange]:
        nodes = chain.from_iterable(self.starts.values())
        return [node for node in nodes if isinstance(node, Exchange)]

    def arrived(self, exchange: Exchange) -> int:
        """The first work that reads something an exchange brings: by then it has ended."""
        readers = chain.from_iterable(self.dag.consumers.get(v, ()) for v in exchange.writes)
        here = (self.position[reader] for reader in readers if reader in self.position)
        return min(here, default=len(self.work))

    def name(self, value: ValueId, devices: tuple[Device, ...]) -> str:
        """The buffer of a value; inputs of a second replica on this device have their own."""
        if len(self.replicas.feeds[0]) == 1 or self.dag.values[value].role not in LOADED:
            return value
        replica, _ = self.replicas.place(devices, self.device)
        return replica_buffer(value, replica)

    def names(self, node: Node) -> list[tuple[Sum, str]]:
        """What a node reads, and the buffer of each single value."""
        if len(self.replicas.feeds[0]) == 1:
            return [(total, total[0]) for total in node.reads]
        return [(total, self.name(total[0], node.devices or ())) for total in node.reads]


def rows(
    dag: Dag, devices: Sequence[Device] | None = None, careful: bool = False
) -> dict[Device, Row]:
    """Of all devices, or of some that exchange values with each other only.

    `careful`: with one receive under way on each channel, from the end of the last to its own.
    """
    chosen = dag.devices if devices is None else devices
    known = replicas(node.devices for node in dag.computes if node.devices)
    found, here = {device: Row(dag, device, known) for device in chosen}, Present(chosen)
    for name in dag.sequence:
        node = dag.nodes[name]
        match node:
            case Transfer():
                for device in here.of(node.source):
                    found[device].start(node)
                for device in here.of(node.devices):
                    found[device].gets[node.id] = node
            case Collective() | Exchange():
                for device in here.of(node.devices):
                    row = found[device]
                    row.started[node.id] = len(row.work)
                    row.start(node)
            case Compute() | UpdateNode() | Totals():
                for device in here.of(node.devices):
                    row = found[device]
                    row.position[node.id] = len(row.work)
                    row.work.append(node)
            case _:
                assert_never(node)
    for row in found.values():
        for starts in row.starts.values():
            starts.sort(key=lambda node: urgency(dag, node))
        first_uses(dag, row)
        post_receives(row, careful)
    return found


def urgency(dag: Dag, node: Start) -> int:
    """Others wait for what is sent; what is gathered is needed before what is reduced."""
    if isinstance(node, Exchange):
        return 0
    if isinstance(node, Collective):
        return 1 if node.kind is Kind.ALL_GATHER else 3
    makers = [dag.nodes[dag.producers[v]] for v in node.reads[0] if v in dag.producers]
    return 2 if any(isinstance(maker, Collective) for maker in makers) else 0


def first_uses(dag: Dag, row: Row) -> None:
    for transfer in row.gets.values():
        readers = dag.consumers.get(transfer.writes[0], ())
        here = [row.position[reader] for reader in readers if reader in row.position]
        here += [row.started[reader] for reader in readers if reader in row.started]
        row.uses[transfer.id] = min(here, default=None)


def post_receives(row: Row, careful: bool) -> None:
    """A receive is posted so much work before its value is used that it arrives meanwhile.

    On each channel receives keep the order of the sends.
    """
    when = carefully if careful else in_time
    channels: dict[tuple[Device, str], list[Transfer]] = {}
    for transfer in row.gets.values():
        channels.setdefault((sender(transfer, row.device), transfer.stream), []).append(transfer)
    for queue in channels.values():
        wanted = when(row, queue)
        latest = list(accumulate(reversed(wanted), min))[::-1]
        for transfer, position in zip(queue, latest, strict=True):
            row.posts.setdefault(position, []).append(transfer)


def in_time(row: Row, queue: Sequence[Transfer]) -> list[float]:
    uses = [row.uses[transfer.id] for transfer in queue]
    return [
        len(row.work) if use is None else ahead(row, use, transfer)
        for use, transfer in zip(uses, queue, strict=True)
    ]


def carefully(row: Row, queue: Sequence[Transfer]) -> list[float]:
    """As soon as the one before it was used: never behind one that may not have ended. What a
    collective reads is posted beside it, after the sends that start there."""
    found, free = in_time(row, queue), 0
    for k, transfer in enumerate(queue):
        use = row.uses[transfer.id]
        if use is None or row.dag.values[transfer.writes[0]].is_given:
            continue
        if any(reader in row.started for reader in row.dag.consumers[transfer.writes[0]]):
            found[k] = use - 0.5
        elif free <= use:
            found[k] = min(found[k], free)
        free = use + 1
    return found


def ahead(row: Row, use: int, transfer: Transfer) -> int:
    """One piece of work before the use, or more if they are small: as long as the way takes."""
    dag, position = row.dag, use
    _, left = dag.transits.get(transfer.id, (0.0, 0.0))
    while position > 0 and (position == use or left > 0) and use - position < EARLIEST:
        position -= 1
        start, end = dag.times.get(row.work[position].id, (0.0, 1.0))
        left -= end - start
    return position


def sender(transfer: Transfer, receiver: Device) -> Device:
    return transfer.source[transfer.devices.index(receiver)]


def receiver(transfer: Transfer, sender: Device) -> Device:
    return transfer.devices[transfer.source.index(sender)]


def proven_received(dag: Dag, all_rows: dict[Device, Row], row: Row) -> dict[NodeId, int]:
    """For each send of a device, the position of its own work by which the peer must have it.

    When this device reads something its peer made after reading what was sent, the send has ended:
    waiting for it there costs nothing. Sends without such a proof end with the step.
    """
    heard = {peer: evidence(dag, all_rows[peer], row) for peer in peers(row)}
    proofs: dict[NodeId, int] = {}
    for transfer in row.sends:
        peer = receiver(transfer, row.device)
        use = all_rows[peer].uses[transfer.id]
        if use is None:
            continue
        positions, made = heard[peer]
        k = bisect_left(made, use)
        if k < len(made):
            proofs[transfer.id] = positions[k]
    return proofs


def peers(row: Row) -> list[Device]:
    return list(dict.fromkeys(receiver(transfer, row.device) for transfer in row.sends))


def evidence(dag: Dag, peer: Row, row: Row) -> tuple[list[int], list[int]]:
    """Positions where this device reads from the peer, with how far the peer had come by then."""
    found: list[tuple[int, int]] = []
    for transfer in row.gets.values():
        use = row.uses[transfer.id]
        if use is not None and sender(transfer, row.device) == peer.device:
            made = max(progress(dag, peer, value) for value in transfer.reads[0])
            found.append((use, made))
    found.sort()
    return [use for use, _ in found], list(accumulate((made for _, made in found), max))


def progress(dag: Dag, peer: Row, value: ValueId) -> int:
    maker: Node = dag.nodes[dag.producers[value]]
    return peer.position.get(maker.id, -1)
