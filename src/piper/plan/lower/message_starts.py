"""In which order a device starts messages, and which receives an order names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Exchange, Fetch, Kind, Node, Redistribute, Store, Transfer
from piper.names import Device, NodeId
from piper.plan.instructions.communicator import Channel


@dataclass(frozen=True, slots=True)
class Receive:
    """The receiving end of a transfer, where an order says when it is posted."""

    transfer: Transfer

    @property
    def id(self) -> NodeId:
        return self.transfer.id


# Asynchronous: started, and waited for later.
Start = Transfer | Collective | Exchange | Redistribute | Store | Fetch | Receive


class MessageStarts:
    """What orders say about messages (partial precedences), and what is urgent by itself."""

    def __init__(self, dag: Dag, careful: bool = False) -> None:
        self.dag, self.careful = dag, careful
        self.orders = [p for p in dag.precedences if p.partial]

    def urgency(self, start: Start) -> int:
        """Of messages that start at the same time, the least goes first."""
        return max(urgency(self.dag, start), self.raised.get(start.id, 0))

    @cached_property
    def raised(self) -> dict[NodeId, int]:
        """A message is no more urgent than those that an order puts before it.

        All that follows on its channel is not, either: receives expect sends in this order.
        """
        found: dict[NodeId, int] = {}
        channels: dict[tuple[str, tuple[Device, ...], tuple[Device, ...]], int] = {}
        before = self.before()
        for name in self.dag.sequence if before else ():
            node = self.dag.nodes[name]
            least = max((found.get(one, 0) for one in before.get(name, ())), default=0)
            if isinstance(node, Transfer):
                channel = node.stream, node.source, node.devices
                least = channels[channel] = max(least, channels.get(channel, 0))
            if isinstance(node, Transfer | Collective | Exchange | Redistribute):
                found[name] = max(least, urgency(self.dag, node))
        return found

    def before(self) -> dict[NodeId, list[NodeId]]:
        """For each message in an order, the messages right before it."""
        found: dict[NodeId, list[NodeId]] = {}
        for order in self.orders:
            for name in order.after:
                found.setdefault(name, []).extend(order.before)
        return found

    @cached_property
    def channels(self) -> set[Channel]:
        """Channels with a receive that an order puts before or after something on its device.

        If careful, with any transfer that an order names: its sends may not go in order of use.
        """
        found: set[Channel] = set()
        for order in self.orders:
            for names, others in ((order.before, order.after), (order.after, order.before)):
                transfers = [n for n in map(self.dag.nodes.get, names) if isinstance(n, Transfer)]
                there = self.places(others) if transfers and not self.careful else set()
                found.update(
                    channel_of(one, device)
                    for one in transfers
                    for device in one.devices
                    if self.careful or device in there
                )
        return found

    def places(self, names: Iterable[NodeId]) -> set[Device]:
        return {device for name in names for device in ends(self.dag.nodes[name])}


def ends(node: Node) -> tuple[Device, ...]:
    """All devices that run a node, or an end of it."""
    return (*node.source, *node.devices) if isinstance(node, Transfer) else node.devices or ()


def urgency(dag: Dag, node: Start) -> int:
    """Sends first, because peers wait for them; then gathers, whose values are needed soon."""
    if isinstance(node, Exchange | Redistribute | Receive):
        return 0
    if isinstance(node, Store | Fetch):
        return 4 if isinstance(node, Store) else 1
    if isinstance(node, Collective):
        return 1 if node.kind is Kind.ALL_GATHER else 3
    makers = [dag.nodes[dag.producers[v]] for v in node.reads[0] if v in dag.producers]
    return 2 if any(isinstance(maker, Collective) for maker in makers) else 0


def channel_of(transfer: Transfer, receiver: Device) -> Channel:
    return Channel(transfer.stream, sender(transfer, receiver), receiver)


def sender(transfer: Transfer, receiver: Device) -> Device:
    return transfer.source[transfer.devices.index(receiver)]


def receiver(transfer: Transfer, sender: Device) -> Device:
    return transfer.devices[transfer.source.index(sender)]


def needs_memory(node: Start) -> bool:
    """Whether it fills memory that may have to be freed first."""
    if isinstance(node, Collective):
        return node.kind is Kind.ALL_GATHER
    return isinstance(node, Fetch)
