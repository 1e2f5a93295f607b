"""What devices do together, on paper: they send, receive, reduce, gather and exchange."""

from __future__ import annotations

from typing import NoReturn

from piper.ir.naming import sent
from piper.ir.nodes import Collective, Kind, Transfer
from piper.ir.nodes import Exchange as ExchangeNode
from piper.plan.buffer_layout import offsets
from piper.plan.check.contents import Contents, Paper
from piper.plan.instructions import Exchange, Gather, Instruction, Recv, Reduce, Send
from piper.plan.rendezvous import Event


class Meetings(Paper):
    """Sends meet receives in order on their channel, groups come together in order."""

    def transfer(self, machine: Contents, moved: Send | Recv) -> None:
        node = self.dag.nodes.get(moved.node)  # type: ignore[call-overload]
        if not isinstance(node, Transfer):
            self.refuse(machine, f"{moved.node} is no transfer")
        self.once(machine, sent(moved.node) if isinstance(moved, Send) else moved.node)
        self.refuse_other_wire(machine, moved, node)
        if isinstance(moved, Send):
            self.compare(machine, [moved.value], node.reads)
            machine.used.setdefault(moved.value, []).append(machine.at)
        else:
            if moved.value in machine.states:
                self.refuse_unsent(machine, moved.value)
                machine.holds.pop(moved.value, None)
            self.write(machine, moved.value, {node.writes[0]})
        self.meet(machine, moved)

    def refuse_other_wire(self, machine: Contents, moved: Send | Recv, node: Transfer) -> None:
        """Both ends, the stream and the shapes are those of the DAG."""
        here, value = machine.plan.device, self.dag.values[node.writes[0]]
        ends = (here, moved.peer) if isinstance(moved, Send) else (moved.peer, here)
        shapes = tuple((spec.shape, spec.dtype) for spec in value.specs)
        pairs = zip(node.source, node.devices, strict=True)
        if ends not in pairs or (moved.shapes, moved.stream) != (shapes, node.stream):
            self.refuse(machine, f"{node.id} does not go from {ends[0]} to {ends[1]} like this")
        if isinstance(moved, Recv) and moved.bundle != value.bundle:
            self.refuse(machine, f"{node.id} is {'a' if value.bundle else 'no'} bundle")

    def meet(self, machine: Contents, one: Instruction) -> list[Event] | None:
        """Whoever meets must be at the same node."""
        if isinstance(one, Send | Recv) and one.peer not in self.devices:
            self.refuse(machine, f"there is no device {one.peer}")
        met = super().meet(machine, one)
        for event in met or ():
            other = self.instruction(event)
            if other.node != one.node:
                self.refuse_other_node(machine, one, met or [])
        return met

    def instruction(self, event: Event) -> Instruction:
        return self.devices[event[0]].plan.instructions[event[1]]

    def refuse_other_node(self, machine: Contents, one: Instruction, met: list[Event]) -> NoReturn:
        all_of_them = {event: self.instruction(event) for event in met}
        match [*all_of_them.items()]:
            case [((source, _), Send() as send), ((target, _), Recv() as recv)]:
                what = f"device {source} sends {send.value} where device {target} expects"
                self.refuse(machine, f"{what} {recv.value}", *met)
            case _:
                rows = (f"device {d} is at {other.node}" for (d, _), other in all_of_them.items())
                self.refuse(machine, f"on {one.stream}, {', '.join(rows)}", *met)

    def reduce(self, machine: Contents, reduce: Reduce) -> None:
        kind = Kind.REDUCE_SCATTER if reduce.scatter else Kind.ALL_REDUCE
        node = self.collective(machine, reduce, kind)
        self.compare(machine, [reduce.value], node.reads)
        self.take(machine, reduce.value)
        self.write(machine, reduce.into, {node.writes[0]})
        self.meet(machine, reduce)

    def gather(self, machine: Contents, gather: Gather) -> None:
        node = self.collective(machine, gather, Kind.ALL_GATHER)
        self.compare(machine, [gather.value], node.reads)
        machine.used.setdefault(gather.value, []).append(machine.at)
        known = self.dag.values[node.writes[0]]
        if gather.shapes != tuple((spec.shape, spec.dtype) for spec in known.specs):
            self.refuse(machine, f"{gather.into} has other shapes")
        self.fill(machine, gather)
        self.write(machine, gather.into, {node.writes[0]})
        self.meet(machine, gather)

    def fill(self, machine: Contents, gather: Gather) -> None:
        """A buffer takes one gather at a time, and has room for it."""
        sizes, inside = machine.plan.buffers, machine.filled.get(gather.buffer)
        if inside is not None:
            self.refuse_unsent(machine, inside)
            if inside in machine.holds:
                what = f"buffer {gather.buffer} still holds {inside}"
                self.refuse(machine, what, machine.made[inside])
        if (
            not 0 <= gather.buffer < len(sizes)
            or sizes[gather.buffer] < offsets(gather.messages)[-1]
        ):
            self.refuse(machine, f"buffer {gather.buffer} has no room for {gather.into}")
        machine.filled[gather.buffer] = gather.into
        machine.rewritten.add(gather.into)

    def collective(self, machine: Contents, one: Reduce | Gather, kind: Kind) -> Collective:
        """The node behind an instruction, which must be just like it."""
        node, here = self.dag.nodes.get(one.node), machine.plan.device  # type: ignore[call-overload]
        if not isinstance(node, Collective) or node.kind is not kind or here not in one.group:
            self.refuse(machine, f"{one.node} is no {kind} of device {here}")
        self.once(machine, one.node)
        messages = tuple((m.dtype, m.tensors, m.padded) for m in node.messages)
        wanted = (messages, node.stream)
        if one.group not in node.groups or (one.messages, one.stream) != wanted:
            self.refuse(machine, f"{one.node} is not among {list(one.group)} like this")
        found: Collective = node
        return found

    def exchange(self, machine: Contents, one: Exchange) -> None:
        """It reads and writes what its node does; rows stay as they are until it has ended."""
        node, here = self.dag.nodes.get(one.node), machine.plan.device  # type: ignore[call-overload]
        if not isinstance(node, ExchangeNode) or here not in one.group:
            self.refuse(machine, f"{one.node} is no exchange of device {here}")
        self.once(machine, one.node)
        shapes = tuple((s.shape, s.dtype) for v in node.rows for s in self.dag.values[v].specs)
        found = (one.way, one.stream, one.shapes, len(one.writes))
        if one.group not in node.groups or found != (
            node.way, node.stream, shapes, len(node.writes),
        ):  # fmt: skip
            self.refuse(machine, f"{one.node} is not among {list(one.group)} like this")
        self.compare(machine, one.reads, self.expected(machine, node))
        for buffer in one.reads:
            machine.used.setdefault(buffer, []).append(machine.at)
        for buffer, value in zip(one.writes, node.writes, strict=True):
            self.write(machine, buffer, {value})
        self.meet(machine, one)
