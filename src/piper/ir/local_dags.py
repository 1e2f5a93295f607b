"""The DAG as one device sees it, where a device may have several replicas of a region.

Elsewhere, one node stands for all its replicas: a device runs it once, and one DAG serves all
devices. A device with several replicas of a node runs it for one after the other. In its own DAG,
each of them is a node, with values of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import assert_never

from piper.ir.dag import Dag
from piper.ir.naming import elsewhere, of_replica, replica_buffer
from piper.ir.nodes import Collective, Compute, Exchange, Node, Precedence, Sum, Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.ir.replicas import Replicas, distinct
from piper.ir.values import LOADED, PER_DEVICE
from piper.names import Device, NodeId, ValueId

Devices = tuple[Device, ...]


@dataclass(frozen=True)
class View:
    """A DAG, the devices that see it, and how inputs are divided among replicas in it."""

    dag: Dag
    replicas: Replicas
    devices: Devices


def views(dag: Dag, devices: Sequence[Device]) -> Iterator[View]:
    """One view for all devices, or one for each if some have several replicas of a region."""
    if not dag.shares_devices:
        yield View(dag, dag.replicas, tuple(devices))
        return
    local = LocalDags(dag)
    for device in devices:
        yield View(local.of(device), Replicas(((device,),), ((0,),)), (device,))


@dataclass
class LocalDags:
    """Makes the DAG of each device; what all have in common is made once."""

    dag: Dag
    known: dict[int, tuple[Devices, dict[Device, list[int]]]] = field(default_factory=dict)

    def of(self, device: Device) -> Dag:
        """Its nodes, in order. Times of a node are divided among its replicas."""
        local = {
            name: list(self.local(self.dag.nodes[name], device)) for name in self.on.get(device, ())
        }
        copies = {name: tuple(one.id for one in made) for name, made in local.items()}
        makers, transits = self.dag.makers, self.dag.transits
        return replace(
            self.dag,
            nodes={one.id: one for made in local.values() for one in made},
            values=self.dag.local_values,
            sequence=tuple(copy for name in copies for copy in copies[name]),
            precedences=tuple(renamed(self.orders.get(device, ()), copies)),
            makers={c: makers[name] for name in copies if name in makers for c in copies[name]},
            times=dict(divided(self.dag, copies)),
            transits={c: t for name in copies if (t := transits.get(name)) for c in copies[name]},
        )

    @cached_property
    def on(self) -> dict[Device, list[NodeId]]:
        """What each device takes part in, in order."""
        found: dict[Device, list[NodeId]] = {device: [] for device in self.dag.devices}
        for name in self.dag.sequence:
            for device in participants(self.dag.nodes[name]):
                found[device].append(name)
        return found

    @cached_property
    def orders(self) -> dict[Device, list[Precedence]]:
        """The orders that each device has to keep."""
        found: dict[Device, list[Precedence]] = {}
        for order in self.dag.precedences:
            for device in participants(self.dag.nodes[order.before[0]]) if order.before else ():
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

    def local(self, node: Node, device: Device) -> Iterator[Node]:
        match node:
            case Compute():
                for replica in self.where(node.devices or ()).get(device, ()):
                    yield self.run(node, replica, device)
            case Transfer():
                yield from self.messages(node, device)
            case Totals():
                yield self.totals(node, device)
            case Collective() | UpdateNode():
                yield replace(node, reads=tuple(self.total(t, device) for t in node.reads))
            case Exchange():  # has one replica here
                yield replace(node, devices=(device,))
            case _:
                assert_never(node)

    def run(self, node: Compute, replica: int, device: Device) -> Compute:
        devices = node.devices or ()
        return replace(
            node,
            id=of_replica(node.id, self.number(devices, replica)),
            reads=tuple(self.sum(total, devices, replica) for total in node.reads),
            writes=tuple(self.name(value, devices, replica) for value in node.writes),
            devices=(device,),
        )

    def messages(self, node: Transfer, device: Device) -> Iterator[Transfer]:
        """One message for each replica. Both ends call it by the same name."""
        sent, received = self.where(node.source), self.where(node.devices)
        for replica in sorted({*sent.get(device, ()), *received.get(device, ())}):
            yield replace(
                node,
                id=of_replica(node.id, replica),
                reads=tuple(self.sum(total, node.source, replica) for total in node.reads),
                writes=tuple(self.name(value, node.devices, replica) for value in node.writes),
                source=(node.source[replica],),
                devices=(node.devices[replica],),
            )

    def totals(self, node: Totals, device: Device) -> Totals:
        """Losses in the order of the batch of its feed; gradients of all replicas here."""
        feed = self.dag.replicas.feeds[self.dag.replicas.feed(device)]
        losses = tuple(
            self.loss(value, replica, device) for replica in feed for value in node.reads[0]
        )
        grads = (self.total(total, device) or total for total in node.reads[1:])
        return replace(node, reads=(losses, *grads))

    def loss(self, value: ValueId, replica: int, device: Device) -> ValueId:
        devices = self.dag.nodes[self.dag.producers[value]].devices or ()
        if devices[replica] != device:
            return elsewhere(value, replica)
        return self.name(value, devices, replica)

    def total(self, total: Sum, device: Device) -> Sum:
        """A sum over all replicas on a device."""
        return tuple(name for value in total for name in self.names(value, device))

    def names(self, value: ValueId, device: Device) -> list[ValueId]:
        maker = self.dag.producers.get(value)
        if maker is None or self.dag.values[value].role in PER_DEVICE:
            return [value]
        devices = self.dag.nodes[maker].devices or ()
        here = self.where(devices).get(device, ())
        return [replica_buffer(value, k) for k in range(len(here))]

    def sum(self, total: Sum, devices: Devices, replica: int) -> Sum:
        return tuple(self.name(value, devices, replica) for value in total)

    def name(self, value: ValueId, devices: Devices, replica: int) -> ValueId:
        """What a replica calls a value on its device."""
        role = self.dag.values[value].role
        if role in PER_DEVICE:
            return value
        if role in LOADED:
            feed = next(feed for feed in self.dag.replicas.feeds if replica in feed)
            return replica_buffer(value, feed.index(replica))
        return replica_buffer(value, self.number(devices, replica))

    def number(self, devices: Devices, replica: int) -> int:
        """Which of the replicas on its device it is."""
        return self.where(devices)[devices[replica]].index(replica)


def participants(node: Node) -> Sequence[Device]:
    """The devices that do something for a node, each once."""
    if isinstance(node, Transfer):
        return tuple(dict.fromkeys((*node.source, *node.devices)))
    return distinct(node.devices or ())


Copies = dict[NodeId, tuple[NodeId, ...]]  # of each node, on one device


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
    count = len(dag.replicas.lists[0])
    numbers = {
        name: count if isinstance(node, Compute | Transfer) else 1
        for name, node in dag.nodes.items()
    }
    return {of_replica(name, k): name for name, most in numbers.items() for k in range(most)}
