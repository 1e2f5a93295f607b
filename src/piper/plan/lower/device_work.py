"""The work of each device, in order: the nodes it runs, the values it sends and receives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from math import inf
from typing import assert_never

from piper.ir.by_device.local_dags import views
from piper.ir.by_device.roles import Present
from piper.ir.dag import Dag
from piper.ir.naming import replica_buffer
from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Kind,
    Node,
    Redistribute,
    Store,
    Sum,
    Totals,
    Transfer,
)
from piper.ir.nodes import Update as UpdateNode
from piper.ir.placement.replicas import Replicas
from piper.ir.values import LOADED
from piper.names import Device, NodeId, RegionId, ValueId
from piper.plan.instructions.communicator import Channel
from piper.plan.lower.message_starts import (
    MessageStarts,
    Receive,
    Start,
    channel_of,
    receiver,
    sender,
)

Work = Compute | Redistribute | UpdateNode | Totals


NEVER = (inf, inf)
EARLIEST = 12  # nodes by which a receive may be posted ahead of its use


@dataclass
class DeviceWork:
    """One device's part of the sequence.

    Positions count its nodes. `sends`, `collectives` and `exchanges` are cached: read them only
    when the whole sequence has been added.
    """

    dag: Dag
    device: Device
    replicas: Replicas
    nodes: list[Work] = field(default_factory=list)
    position: dict[NodeId, int] = field(default_factory=dict)
    starts: dict[int, list[Start]] = field(default_factory=dict)  # before this position
    started: dict[NodeId, int] = field(default_factory=dict)  # position of each collective
    gets: dict[NodeId, Transfer] = field(default_factory=dict)
    uses: dict[NodeId, int | None] = field(default_factory=dict)  # position of its first reader
    posts: dict[float, list[Transfer]] = field(default_factory=dict)  # before this position
    # (n - 0.5: among the collectives that start at n)

    def start(self, node: Start) -> None:
        """It starts after all nodes so far."""
        self.starts.setdefault(len(self.nodes), []).append(node)

    @cached_property
    def sends(self) -> list[Transfer]:
        nodes = chain.from_iterable(self.starts.values())
        return [node for node in nodes if isinstance(node, Transfer)]

    @cached_property
    def collectives(self) -> list[Collective]:
        nodes = chain.from_iterable(self.starts.values())
        return [node for node in nodes if isinstance(node, Collective)]

    @cached_property
    def exchanges(self) -> list[Exchange | Redistribute | Fetch]:
        """Token all-to-alls, conversions and fetches: what they read may have other readers."""
        nodes = chain.from_iterable(self.starts.values())
        return [node for node in nodes if isinstance(node, (Exchange, Redistribute, Fetch))]

    @cached_property
    def stores(self) -> list[tuple[int, Store]]:
        """Each with the position of the node before it."""
        found = ((at, node) for at, nodes in self.starts.items() for node in nodes)
        return [(at - 1, node) for at, node in found if isinstance(node, Store)]

    @cached_property
    def first_operands(self) -> set[ValueId]:
        """What messages that start before all nodes read."""
        nodes = (node for node in self.starts.get(0, ()) if not isinstance(node, Receive))
        return {value for node in nodes for total in node.reads for value in total}

    def arrived(self, exchange: Exchange | Redistribute | Fetch) -> int:
        """The first node that reads a result, which has completed by then."""
        readers = chain.from_iterable(self.dag.consumers.get(v, ()) for v in exchange.writes)
        found = [at for reader in readers if (at := self.read_at(reader)) is not None]
        return min(found, default=len(self.nodes))

    def readers(self, node: Collective) -> list[int]:
        """The positions of the nodes here that read its results."""
        readers = chain.from_iterable(self.dag.consumers.get(v, ()) for v in node.writes)
        return [self.position[reader] for reader in readers if reader in self.position]

    def read_at(self, reader: NodeId) -> int | None:
        """The position by which a node has read its operands; None if that is not known."""
        if reader in self.position:
            return self.position[reader]
        node = self.dag.nodes[reader]
        if isinstance(node, Collective) and node.kind is Kind.ALL_GATHER:
            return min(self.readers(node), default=None)
        return self.arrived(node) if isinstance(node, Redistribute) else None

    def name(self, value: ValueId, devices: tuple[Device, ...]) -> str:
        """The buffer of a value. Inputs of a second replica on this device have their own."""
        if self.replicas.parts == 1 or self.dag.values[value].role not in LOADED:
            return value
        replica, _ = self.replicas.place(devices, self.device)
        return replica_buffer(value, replica)

    def names(self, node: Node) -> list[tuple[Sum, str]]:
        """The reads of a node, and the buffer of each single value."""
        if self.replicas.parts == 1:
            return [(total, total[0]) for total in node.reads]
        return [(total, self.name(total[0], node.devices or ())) for total in node.reads]


def device_work(
    dag: Dag, devices: Sequence[Device] | None = None, careful: bool = False, late: bool = False
) -> dict[Device, DeviceWork]:
    """The work of all devices, or of a subset that communicates only among itself.

    `careful`: each channel has at most one receive in flight, posted when the one before it is
    used. `late`: a receive is posted only when its message is about to be sent.
    """
    wanted = dag.devices if devices is None else devices
    found: dict[Device, DeviceWork] = {}
    for view in views(dag, wanted):
        known, orders = view.replicas, MessageStarts(view.dag, careful)
        works = {device: DeviceWork(view.dag, device, known) for device in view.devices}
        distribute(view.dag, works, orders)
        for work in works.values():
            for starts in work.starts.values():
                if len(starts) > 1:
                    starts.sort(key=orders.urgency)
            first_uses(view.dag, work)
            post_receives(work, careful, late, orders)
        found |= works
    return {device: found[device] for device in wanted}


def distribute(dag: Dag, found: dict[Device, DeviceWork], orders: MessageStarts) -> None:
    """Give each device its part of the sequence."""
    here = Present(found)
    for name in dag.sequence:
        node = dag.nodes[name]
        match node:
            case Transfer():
                for device in here.of(node.source):
                    found[device].start(node)
                for device in here.of(node.devices):
                    found[device].gets[node.id] = node
                    if channel_of(node, device) in orders.channels:
                        found[device].start(Receive(node))
            case Collective() | Exchange():
                for device in here.of(node.devices):
                    work = found[device]
                    work.started[node.id] = len(work.nodes)
                    work.start(node)
            case Redistribute() if node.is_message:
                for device in here.of(node.devices):
                    work = found[device]
                    work.started[node.id] = len(work.nodes)
                    work.start(node)
            case Store() | Fetch():
                for device in here.of(node.devices):
                    found[device].start(node)
            case Compute() | Redistribute() | UpdateNode() | Totals():
                for device in here.of(node.devices):
                    work = found[device]
                    work.position[node.id] = len(work.nodes)
                    work.nodes.append(node)
            case _:
                assert_never(node)


def first_uses(dag: Dag, work: DeviceWork) -> None:
    for transfer in work.gets.values():
        readers = dag.consumers.get(transfer.writes[0], ())
        here = [work.position[reader] for reader in readers if reader in work.position]
        here += [work.started[reader] for reader in readers if reader in work.started]
        work.uses[transfer.id] = min(here, default=None)


def post_receives(work: DeviceWork, careful: bool, late: bool, orders: MessageStarts) -> None:
    """Post each receive early enough for its value to arrive before it is used.

    On each channel, receives keep the order of the sends. If an order names one of them, all of the
    channel are posted where the sequence has them.
    """
    starts = sequence_starts(work)
    channels: dict[Channel, list[Transfer]] = {}
    for transfer in work.gets.values():
        channel = channel_of(transfer, work.device)
        if channel not in orders.channels:
            channels.setdefault(channel, []).append(transfer)
    for queue in channels.values():
        wanted = in_time(work, queue, starts, late and not careful)
        if careful:
            wanted = carefully(work, queue, wanted)
        latest = list(accumulate(reversed(wanted), min))[::-1]
        for transfer, position in zip(queue, latest, strict=True):
            work.posts.setdefault(position, []).append(transfer)


def in_time(
    work: DeviceWork, queue: Sequence[Transfer], starts: Sequence[int], late: bool
) -> list[float]:
    uses = [work.uses[transfer.id] for transfer in queue]
    return [
        len(work.nodes) if use is None
        else -0.5 if use == 0 and is_for_a_collective(work, transfer)
        else posted(work, use, transfer, starts, late)
        for use, transfer in zip(uses, queue, strict=True)
    ]  # fmt: skip


def is_for_a_collective(work: DeviceWork, transfer: Transfer) -> bool:
    return any(reader in work.started for reader in work.dag.consumers[transfer.writes[0]])


def carefully(work: DeviceWork, queue: Sequence[Transfer], in_time: Sequence[float]) -> list[float]:
    """Post a receive as soon as the one before it was used, so that it never queues behind one that
    may not have completed. A receive for a collective is posted right before the collective, after
    the sends that start there."""
    found, free = list(in_time), 0
    for k, transfer in enumerate(queue):
        use = work.uses[transfer.id]
        if use is None or work.dag.values[transfer.writes[0]].is_given:
            continue
        if is_for_a_collective(work, transfer):
            found[k] = use - 0.5
        elif free <= use:
            found[k] = min(found[k], free)
        free = use + 1
    return found


def posted(
    work: DeviceWork, use: int, transfer: Transfer, starts: Sequence[int], late: bool
) -> float:
    """Where a kernel sequence starts, so that the receive does not cut it in two."""
    early = ahead(work, use, transfer)
    if early < 0:
        return early
    first = starts[int(early)]
    if not late or is_for_a_collective(work, transfer):
        return first
    return last_moment(work, use, transfer, starts, first)


def last_moment(
    work: DeviceWork, use: int, transfer: Transfer, starts: Sequence[int], early: int
) -> int:
    """The first sequence that starts when the value has been made, at the latest the use itself.

    On a GPU, a receive that waits for its message keeps some SMs busy.
    """
    dag, position = work.dag, use
    makers = (dag.producers.get(value) for value in transfer.reads[0])
    made = max((dag.times.get(maker, NEVER)[1] for maker in makers if maker), default=0.0)
    while position > early:
        before = starts[position - 1]
        if before < early or dag.times.get(work.nodes[before].id, NEVER)[0] < made:
            break
        position = before
    return position


def sequence_starts(work: DeviceWork) -> list[int]:
    """For each position, where its kernel sequence starts: see `plan/analyse/kernel_sequences`.

    A sequence runs one phase of several regions. It ends where a message starts or is needed.
    """
    comes = {use for use in work.uses.values() if use is not None}
    comes.update(work.arrived(node) for node in work.exchanges)
    comes.update(min(at, default=0) for at in map(work.readers, work.collectives))
    found: list[int] = []
    phase, regions = None, set[RegionId]()  # of the sequence so far
    for position, node in enumerate(work.nodes):
        if not isinstance(node, Compute):
            phase, regions = None, set()
            found.append(position)
            continue
        cut = position in comes or bool(work.starts.get(position))
        if cut or node.phase is not phase or node.region in regions:
            phase, regions = node.phase, set()
            found.append(position)
        else:
            found.append(found[-1])
        regions.add(node.region)
    return found


def ahead(work: DeviceWork, use: int, transfer: Transfer) -> float:
    """At least one node before the use, and as many as it takes to cover the transfer time."""
    dag, position = work.dag, use
    if use == 0 and transfer.writes[0] in work.first_operands:
        return -0.5
    _, left = dag.transits.get(transfer.id, (0.0, 0.0))
    while position > 0 and (position == use or left > 0) and use - position < EARLIEST:
        position -= 1
        start, end = dag.times.get(work.nodes[position].id, (0.0, 1.0))
        left -= end - start
    return position


def proven_received(all_work: dict[Device, DeviceWork], work: DeviceWork) -> dict[NodeId, int]:
    """For each send of a device, the position by which the peer has received it for sure.

    If this device reads a value that the peer computed after it used the message, the send has
    completed: waiting for it there costs nothing. Sends without such a proof end with the step.
    """
    received = {peer: evidence(all_work[peer], work) for peer in peers(work)}
    proofs: dict[NodeId, int] = {}
    for transfer in work.sends:
        peer = receiver(transfer, work.device)
        use = all_work[peer].uses[transfer.id]
        if use is None:
            continue
        positions, made = received[peer]
        k = bisect_left(made, use)
        if k < len(made):
            proofs[transfer.id] = positions[k]
    return proofs


def peers(work: DeviceWork) -> list[Device]:
    return list(dict.fromkeys(receiver(transfer, work.device) for transfer in work.sends))


def evidence(peer: DeviceWork, work: DeviceWork) -> tuple[list[int], list[int]]:
    """Positions at which this device reads from the peer, and the peer's position by then."""
    found: list[tuple[int, int]] = []
    for transfer in work.gets.values():
        use = work.uses[transfer.id]
        if use is not None and sender(transfer, work.device) == peer.device:
            made = max(progress(peer, value) for value in transfer.reads[0])
            found.append((use, made))
    found.sort()
    return [use for use, _ in found], list(accumulate((made for _, made in found), max))


def progress(peer: DeviceWork, value: ValueId) -> int:
    return peer.position.get(peer.dag.producers[value], -1)
