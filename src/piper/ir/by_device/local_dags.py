"""The DAG as one device sees it, where a device may have several replicas of a region.

Elsewhere, one node stands for all its replicas: a device runs it once, and one DAG serves all
devices. A device with several replicas of a node runs it for one after the other. In its own DAG,
each of them is a node, with values of its own. Nothing is sent there from a device to itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TypeVar, assert_never

from piper.ir.dag import Dag
from piper.ir.naming import elsewhere, of_replica, replica_buffer, weights
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
    Totals,
    Transfer,
)
from piper.ir.nodes import Update as UpdateNode
from piper.ir.placement.replicas import Replicas, distinct
from piper.ir.values import LOADED, PER_DEVICE, Role
from piper.names import Device, NodeId, ValueId

Devices = tuple[Device, ...]
Place = tuple[NodeId, int | None]  # a node, for one replica or for all
Local = TypeVar("Local", bound=Compute | Redistribute | Store | Fetch)  # of each replica by itself
Copies = dict[NodeId, list[NodeId]]  # of each node, on one device


@dataclass(frozen=True)
class View:
    """A DAG, the devices that see it, and how inputs are divided among replicas in it."""

    dag: Dag
    replicas: Replicas
    devices: Devices


def views(dag: Dag, devices: Sequence[Device]) -> Iterator[View]:
    """One view for all devices, or one for each if some of them do not run each node once.

    Replicas with different numbers of rows have different views.
    """
    kinds: dict[int, tuple[Dag, list[Device]]] = {}
    for device in devices:
        seen = dag.seen_by(device)
        kinds.setdefault(id(seen), (seen, []))[1].append(device)
    for seen, its in kinds.values():
        yield from views_of(seen, its)


def views_of(dag: Dag, devices: Sequence[Device]) -> Iterator[View]:
    if not dag.shares_devices:
        yield View(dag, dag.replicas, tuple(devices))
        return
    local = LocalDags(dag)
    for device in devices:
        yield View(local.of(device), Replicas(((device,),), ((0,),), ((0,),), 1), (device,))


@dataclass
class LocalDags:
    """Makes the DAG of each device; what all have in common is made once."""

    dag: Dag
    known: dict[int, tuple[Devices, dict[Device, list[int]]]] = field(default_factory=dict)

    def of(self, device: Device) -> Dag:
        """Its nodes, in order. Times of a node are divided among its replicas."""
        nodes: dict[NodeId, Node] = {}
        copies: Copies = {}
        for name, replica in self.places.get(device, ()):
            for copy in self.local(self.dag.nodes[name], device, replica):
                nodes[copy.id] = copy
                copies.setdefault(name, []).append(copy.id)
        makers, transits = self.dag.makers, self.dag.transits
        found = replace(
            self.dag,
            nodes=nodes,
            values=self.dag.local_values,
            sequence=tuple(nodes),
            precedences=tuple(renamed(self.orders.get(device, ()), copies)),
            makers={c: makers[name] for name in copies if name in makers for c in copies[name]},
            times=dict(divided(self.dag, copies)),
            transits={c: t for name in copies if (t := transits.get(name)) for c in copies[name]},
        )
        return found.in_teams_of(self.dag)

    @cached_property
    def places(self) -> dict[Device, list[Place]]:
        """What each device takes part in, in order."""
        found: dict[Device, list[Place]] = {device: [] for device in self.dag.devices}
        for name, replica in in_order(self.dag):
            for device in participants(self.dag.nodes[name], replica):
                found[device].append((name, replica))
        return found

    @cached_property
    def orders(self) -> dict[Device, list[Precedence]]:
        """The orders that each device has to keep."""
        found: dict[Device, list[Precedence]] = {}
        for order in self.dag.precedences:
            nodes = [self.dag.nodes[name] for name in order.before]
            ends = (participants(node) for node in (nodes if order.partial else nodes[:1]))
            for device in dict.fromkeys(chain.from_iterable(ends)):
                found.setdefault(device, []).append(order)
        return found

    def where(self, devices: Devices) -> dict[Device, list[int]]:
        """The replicas of each device of a list; looked up once."""
        found = self.known.get(id(devices))
        if found is None or found[0] is not devices:
            places: dict[Device, list[int]] = {}
            for replica, device in enumerate(devices):
                places.setdefault(device, []).append(replica)
            found = self.known[id(devices)] = (devices, places)
        return found[1]

    def local(self, node: Node, device: Device, replica: int | None) -> Iterator[Node]:
        match node:
            case Store() | Fetch() if self.dag.values[node.writes[0]].role in PER_DEVICE:
                yield replace(node, devices=(device,))
            case Compute() | Redistribute() | Store() | Fetch():
                here = self.where(node.devices or ()).get(device, [])
                for one in here if replica is None else [replica]:
                    yield self.run(node, one, device)
            case Transfer():
                ends = (self.where(row).get(device, []) for row in (node.source, node.devices))
                here = sorted(set(chain.from_iterable(ends))) if replica is None else [replica]
                yield from (self.message(node, k) for k in here if not self.is_there(node, k))
            case Totals():
                yield self.totals(node, device)
            case Collective() | UpdateNode():
                yield replace(node, reads=tuple(self.total(t, device) for t in node.reads))
            case Exchange():  # has one replica here
                yield replace(node, devices=(device,))
            case _:
                assert_never(node)

    def run(self, node: Local, replica: int, device: Device) -> Local:
        devices = node.devices or ()
        return replace(
            node,
            id=of_replica(node.id, self.number(devices, replica)),
            reads=tuple(self.sum(total, devices, replica) for total in node.reads),
            writes=tuple(self.name(value, devices, replica) for value in node.writes),
            devices=(device,),
        )

    def message(self, node: Transfer, replica: int) -> Transfer:
        """The message of one replica. Both ends call it by the same name."""
        return replace(
            node,
            id=of_replica(node.id, self.label(node, replica)),
            reads=tuple(self.sum(total, node.source, replica) for total in node.reads),
            writes=tuple(self.name(value, node.devices, replica) for value in node.writes),
            source=(node.source[replica],),
            devices=(node.devices[replica],),
        )

    def label(self, node: Transfer, replica: int) -> int:
        """Which replica of its feed a message is for: the same number for all devices of a role."""
        row = node.devices
        if len(row) < len(self.dag.replicas.lists[0]):  # replicas on a device get one message
            row = next(one for one in self.dag.replicas.lists if distinct(one) == row)
            replica = row.index(node.devices[replica])
        return self.place(replica)

    def place(self, replica: int) -> int:
        """Its place among the replicas that are given one batch. A team has one place."""
        return self.team_places[replica]

    @cached_property
    def team_places(self) -> dict[int, int]:
        known = self.dag.replicas
        return {r: k for f in known.feeds for k, team in enumerate(known.fed(f)) for r in team}

    def is_there(self, node: Transfer, replica: int) -> bool:
        """Whether a replica has the value without a message. Parameters need no copy at home."""
        known, device = self.dag.values[node.writes[0]], node.devices[replica]
        if known.role is Role.NEW_WEIGHTS and known.bucket:
            return device in self.home(known.bucket)
        return node.source[replica] == device

    def home(self, bucket: str) -> dict[Device, list[int]]:
        return self.where(self.homes[bucket])

    @cached_property
    def homes(self) -> dict[str, Devices]:
        place = {node.region: node.devices or () for node in self.dag.computes}
        return {bucket: place[region] for bucket, region in self.dag.model.first_uses.items()}

    def totals(self, node: Totals, device: Device) -> Totals:
        """Losses in the order of the batch of its feed; gradients of all replicas here."""
        known = self.dag.replicas
        teams = known.fed(known.feeds[known.feed(device)])
        losses = (self.loss(value, team, device) for team in teams for value in node.reads[0])
        grads = (self.total(total, device) or total for total in node.reads[1:])
        return replace(node, reads=(tuple(losses), *grads))

    def loss(self, value: ValueId, team: tuple[int, ...], device: Device) -> ValueId:
        devices = self.dag.nodes[self.dag.producers[value]].devices or ()
        for replica in team:
            if devices[replica] == device:
                return self.name(value, devices, replica)
        return elsewhere(value, self.place(team[0]))

    def total(self, total: Sum, device: Device) -> Sum:
        """A sum over all replicas on a device."""
        return tuple(chain.from_iterable(self.parts(value, device) for value in total))

    def parts(self, value: ValueId, device: Device) -> Sum:
        maker = self.dag.producers.get(value)
        if maker is None or self.dag.values[value].role in PER_DEVICE:
            return (value,)
        devices = self.dag.nodes[maker].devices or ()
        here = self.where(devices).get(device, ())
        return tuple(chain.from_iterable(self.sum((value,), devices, one) for one in here))

    def sum(self, total: Sum, devices: Devices, replica: int) -> Sum:
        """What a replica reads. What it would send to its own device is there already."""
        return tuple(chain.from_iterable(self.sources(v, devices, replica) for v in total))

    def sources(self, value: ValueId, devices: Devices, replica: int) -> Sum:
        maker = self.dag.nodes.get(self.dag.producers.get(value, NodeId("")))
        if isinstance(maker, Transfer):
            at = maker.devices.index(devices[replica]) if maker.devices != devices else replica
            if self.is_there(maker, at):
                return self.sum(maker.reads[0], maker.source, at)
        return (self.name(value, devices, replica),)

    def name(self, value: ValueId, devices: Devices, replica: int) -> ValueId:
        """What a replica calls a value on its device."""
        known = self.dag.values[value]
        if known.role is Role.WEIGHTS and known.copy and known.bucket:
            return weights(known.bucket) if devices[replica] in self.home(known.bucket) else value
        if known.role in PER_DEVICE:
            return value
        if known.role in LOADED:
            return replica_buffer(value, self.place(replica))
        return replica_buffer(value, self.number(devices, replica))

    def number(self, devices: Devices, replica: int) -> int:
        """Which of the replicas on its device it is."""
        return self.where(devices)[devices[replica]].index(replica)


def in_order(dag: Dag) -> Iterator[Place]:
    """The sequence. Of a node with several replicas on a device, each sends what it made before
    the next one runs, unless orders say when messages start."""
    if any(order.partial for order in dag.precedences):
        yield from ((name, None) for name in dag.sequence)
        return
    last: tuple[Compute, list[NodeId], list[NodeId]] | None = None
    for name in dag.sequence:
        node = dag.nodes[name]
        if isinstance(node, Transfer) and last and made_by(dag, node, last[0]):
            last[1].append(name)
        elif isinstance(node, Compute):
            yield from each_replica(last)
            last = node, [], []
        elif last:
            last[2].append(name)
        else:
            yield name, None
    yield from each_replica(last)


def each_replica(last: tuple[Compute, list[NodeId], list[NodeId]] | None) -> Iterator[Place]:
    """A node and what it sends, replica by replica, then all else that starts then."""
    if last is None:
        return
    node, sent, others = last
    if len(distinct(node.devices or ())) == len(node.devices or ()):
        yield from ((name, None) for name in (node.id, *sent))
    else:
        for replica in range(len(node.devices or ())):
            yield from ((name, replica) for name in (node.id, *sent))
    yield from ((name, None) for name in others)


def made_by(dag: Dag, transfer: Transfer, node: Compute) -> bool:
    return all(dag.producers.get(value) == node.id for value in transfer.reads[0])


def participants(node: Node, replica: int | None = None) -> Iterable[Device]:
    """The devices that do something for a node, or for one replica of it, each once."""
    devices = node.devices or ()
    ends = (*node.source, *devices) if isinstance(node, Transfer) else devices
    if replica is None:
        return dict.fromkeys(ends)
    return dict.fromkeys(ends[replica :: len(devices)])


def renamed(orders: Sequence[Precedence], copies: Copies) -> Iterator[Precedence]:
    for order in orders:
        before = tuple(copy for name in order.before for copy in copies.get(name, ()))
        after = tuple(copy for name in order.after for copy in copies.get(name, ()))
        if before and after:
            yield replace(order, before=before, after=after)


def divided(dag: Dag, copies: Copies) -> Iterator[tuple[NodeId, tuple[float, float]]]:
    """The replicas of a node on a device run one after the other."""
    for name, made in copies.items():
        start, end = dag.times.get(name, (0.0, 0.0))
        step = (end - start) / len(made) if isinstance(dag.nodes[name], Compute) else 0.0
        for k, copy in enumerate(made if name in dag.times else ()):
            yield copy, (start + k * step, start + (k + 1) * step if step else end)


def shared_nodes(dag: Dag) -> dict[NodeId, NodeId]:
    """The node that each node of a local DAG is a replica of."""
    if not dag.shares_devices:
        return {name: name for name in dag.nodes}
    count = len(dag.replicas.feeds[0])
    numbers = {
        name: count if isinstance(node, Compute | Redistribute | Transfer | Store | Fetch) else 1
        for name, node in dag.nodes.items()
    }
    return {of_replica(name, k): name for name, most in numbers.items() for k in range(most)}
