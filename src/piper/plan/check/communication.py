"""Symbolic execution of messages: sends, receives, collectives and the token all-to-all."""

from __future__ import annotations

from typing import NoReturn

from piper.ir.naming import sent
from piper.ir.nodes import Collective, Kind, Transfer
from piper.ir.nodes import Exchange as ExchangeNode
from piper.ir.nodes import Fetch as FetchNode
from piper.ir.nodes import Redistribute as RedistributeNode
from piper.ir.nodes import Store as StoreNode
from piper.ir.placement.placements import Step
from piper.plan.buffer_layout import offsets
from piper.plan.check.buffer_contents import BufferChecks, DeviceBuffers
from piper.plan.instructions import (
    Exchange,
    Fetch,
    Gather,
    Instruction,
    Recv,
    Redistribute,
    Reduce,
    Send,
    Slice,
    Store,
)
from piper.plan.rendezvous import Event

TRANSFERS = (Send, Recv)


class CommunicationChecks(BufferChecks):
    """Sends match receives in order on their channel, and collectives match in their group."""

    def transfer(self, device: DeviceBuffers, moved: Send | Recv) -> None:
        node = device.wanted.dag.nodes.get(moved.node)  # type: ignore[call-overload]
        if not isinstance(node, Transfer):
            self.refuse(device, f"{moved.node} is not a transfer")
        self.once(device, sent(moved.node) if isinstance(moved, Send) else moved.node)
        self.refuse_wrong_ends(device, moved, node)
        if isinstance(moved, Send):
            self.compare(device, [moved.value], node.reads)
            device.used.setdefault(moved.value, []).append(device.at)
        else:
            if moved.value in device.states:
                self.refuse_while_sent(device, moved.value)
                device.holds.pop(moved.value, None)
            self.write(device, moved.value, {node.writes[0]})
        self.meet(device, moved)

    def refuse_wrong_ends(self, device: DeviceBuffers, moved: Send | Recv, node: Transfer) -> None:
        """Both ends, the stream and the shapes must be those of the DAG."""
        here, value = device.plan.device, device.wanted.dag.values[node.writes[0]]
        ends = (here, moved.peer) if isinstance(moved, Send) else (moved.peer, here)
        shapes = tuple([(spec.shape, spec.dtype) for spec in value.specs])
        pairs = zip(node.source, node.devices, strict=True)
        if ends not in pairs or (moved.shapes, moved.stream) != (shapes, node.stream):
            self.refuse(device, f"{node.id} from {ends[0]} to {ends[1]} is not as in the DAG")
        if isinstance(moved, Recv) and moved.bundle != value.bundle:
            self.refuse(device, f"{node.id} is {'' if value.bundle else 'not '}a bundle")

    def meet(self, device: DeviceBuffers, one: Instruction) -> list[Event] | None:
        """Match the instruction. All that match must belong to the same node."""
        if isinstance(one, TRANSFERS) and one.peer not in self.devices:
            self.refuse(device, f"there is no device {one.peer}")
        met = super().meet(device, one)
        for event in met or ():
            other = self.instruction(event)
            if other.node != one.node:
                self.refuse_match(device, one, met or [])
        return met

    def instruction(self, event: Event) -> Instruction:
        return self.devices[event[0]].plan.instructions[event[1]]

    def refuse_match(self, device: DeviceBuffers, one: Instruction, met: list[Event]) -> NoReturn:
        matched = {event: self.instruction(event) for event in met}
        match [*matched.items()]:
            case [((source, _), Send() as send), ((target, _), Recv() as recv)]:
                what = f"device {source} sends {send.value} where device {target} expects"
                self.refuse(device, f"{what} {recv.value}", *met)
            case _:
                places = (f"device {d} is at {other.node}" for (d, _), other in matched.items())
                self.refuse(device, f"on {one.stream}, {', '.join(places)}", *met)

    def reduce(self, device: DeviceBuffers, reduce: Reduce) -> None:
        kind = Kind.REDUCE_SCATTER if reduce.scatter else Kind.ALL_REDUCE
        node = self.collective(device, reduce, kind)
        self.compare(device, [reduce.value], node.reads)
        self.take(device, reduce.value)
        self.write(device, reduce.into, {node.writes[0]})
        self.meet(device, reduce)

    def gather(self, device: DeviceBuffers, gather: Gather) -> None:
        node = self.collective(device, gather, Kind.ALL_GATHER)
        self.compare(device, [gather.value], node.reads)
        device.used.setdefault(gather.value, []).append(device.at)
        known = device.wanted.dag.values[node.writes[0]]
        if gather.shapes != tuple((spec.shape, spec.dtype) for spec in known.specs):
            self.refuse(device, f"{gather.into} has different shapes in the DAG")
        self.fill(device, gather)
        self.write(device, gather.into, {node.writes[0]})
        self.meet(device, gather)

    def fill(self, device: DeviceBuffers, gather: Gather) -> None:
        """A gather buffer holds one gather at a time, and must be large enough for it."""
        sizes, inside = device.plan.buffers, device.filled.get(gather.buffer)
        if inside is not None:
            self.refuse_while_sent(device, inside)
            if inside in device.holds:
                what = f"buffer {gather.buffer} still holds {inside}"
                self.refuse(device, what, device.made[inside])
        if (
            not 0 <= gather.buffer < len(sizes)
            or sizes[gather.buffer] < offsets(gather.messages)[-1]
        ):
            self.refuse(device, f"buffer {gather.buffer} is too small for {gather.into}")
        device.filled[gather.buffer] = gather.into
        device.rewritten.add(gather.into)

    def collective(self, device: DeviceBuffers, one: Reduce | Gather, kind: Kind) -> Collective:
        """The node of an instruction, which must have the same messages, stream and group."""
        node, here = device.wanted.dag.nodes.get(one.node), device.plan.device  # type: ignore[call-overload]
        if not isinstance(node, Collective) or node.kind is not kind or here not in one.group:
            self.refuse(device, f"{one.node} is not the {kind} of device {here}")
        self.once(device, one.node)
        messages = tuple((m.dtype, m.tensors, m.padded) for m in node.messages)
        wanted = (messages, node.stream)
        if one.group not in node.groups or (one.messages, one.stream) != wanted:
            self.refuse(device, f"{one.node} among {list(one.group)} is not as in the DAG")
        found: Collective = node
        return found

    def exchange(self, device: DeviceBuffers, one: Exchange) -> None:
        """It reads and writes what its node does. Its operands stay in use until it completes."""
        node, here = device.wanted.dag.nodes.get(one.node), device.plan.device  # type: ignore[call-overload]
        if not isinstance(node, ExchangeNode) or here not in one.group:
            self.refuse(device, f"{one.node} is not a token all-to-all of device {here}")
        self.once(device, one.node)
        values = device.wanted.dag.values
        shapes = tuple((s.shape, s.dtype) for v in node.rows for s in values[v].specs)
        found = (one.way, one.stream, one.shapes, len(one.writes))
        if one.group not in node.groups or found != (
            node.way, node.stream, shapes, len(node.writes),
        ):  # fmt: skip
            self.refuse(device, f"{one.node} among {list(one.group)} is not as in the DAG")
        self.compare(device, one.reads, self.expected(device, node))
        for buffer in one.reads:
            device.used.setdefault(buffer, []).append(device.at)
        for buffer, value in zip(one.writes, node.writes, strict=True):
            self.write(device, buffer, {value})
        self.meet(device, one)

    def redistribute(self, device: DeviceBuffers, one: Redistribute | Slice) -> None:
        """It does the step of its node, with its devices. Its operand stays as it is."""
        dag, here = device.wanted.dag, device.plan.device
        node = dag.nodes.get(one.node)  # type: ignore[call-overload]
        if not isinstance(node, RedistributeNode) or here not in node.devices:
            self.refuse(device, f"{one.node} is not a conversion of device {here}")
        self.once(device, one.node)
        group = next(group for group in node.groups if here in group)
        spec = dag.values[node.reads[0][0]].specs[0]
        wanted = (
            (node.step, (spec.shape, spec.dtype), group, node.stream)
            if isinstance(one, Redistribute)
            else (Step.SLICE, group.index(here), len(group))
        )
        found = (
            (one.step, one.shape, one.group, one.stream)
            if isinstance(one, Redistribute)
            else (node.step, one.part, one.parts)
        )
        if found != wanted:
            self.refuse(device, f"{one.node} is not as in the DAG")
        self.compare(device, [one.value], self.expected(device, node))
        if isinstance(one, Redistribute):
            device.used.setdefault(one.value, []).append(device.at)
        self.write(device, one.into, {node.writes[0]})
        self.meet(device, one)

    def copy(self, device: DeviceBuffers, one: Store | Fetch) -> None:
        """It copies what its node does. Its operand stays in use until it completes."""
        node, here = device.wanted.dag.nodes.get(one.node), device.plan.device  # type: ignore[call-overload]
        kind = StoreNode if isinstance(one, Store) else FetchNode
        if not isinstance(node, kind) or here not in node.devices:
            self.refuse(device, f"{one.node} is not a copy of device {here}")
        self.once(device, one.node)
        value = device.wanted.dag.values[node.writes[0]]
        shapes = tuple([(spec.shape, spec.dtype) for spec in value.specs])
        if (one.shapes, one.stream, one.bucket) != (shapes, node.stream, value.optimizer):
            self.refuse(device, f"{one.node} is not as in the DAG")
        self.compare(device, [one.value], self.expected(device, node))
        device.used.setdefault(one.value, []).append(device.at)
        if one.into in device.states:
            if one.into != value.state:
                self.refuse(device, f"{one.node} does not belong in {one.into}")
            self.refuse_while_sent(device, one.into)
            device.holds.pop(one.into, None)
        self.write(device, one.into, {node.writes[0]})
        self.meet(device, one)
