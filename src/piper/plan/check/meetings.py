"""What devices do together, on paper: they send, receive, reduce, gather and exchange."""

from __future__ import annotations

from piper.ir.nodes import Collective, Kind, Transfer
from piper.ir.nodes import Exchange as ExchangeNode
from piper.plan.buffer_layout import offsets
from piper.plan.check.machine import Machine, Paper
from piper.plan.check.wires import Event, sent
from piper.plan.instructions import Exchange, Gather, Recv, Reduce, Send


class Meetings(Paper):
    """Sends meet receives in order on their channel, groups come together in order."""

    def transfer(self, machine: Machine, moved: Send | Recv) -> None:
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

    def refuse_other_wire(self, machine: Machine, moved: Send | Recv, node: Transfer) -> None:
        """Both ends, the stream and the shapes are those of the DAG."""
        here, value = machine.plan.device, self.dag.values[node.writes[0]]
        ends = (here, moved.peer) if isinstance(moved, Send) else (moved.peer, here)
        shapes = tuple((spec.shape, spec.dtype) for spec in value.specs)
        pairs = zip(node.source, node.devices, strict=True)
        if ends not in pairs or (moved.shapes, moved.stream) != (shapes, node.stream):
            self.refuse(machine, f"{node.id} does not go from {ends[0]} to {ends[1]} like this")
        if isinstance(moved, Recv) and moved.bundle != value.bundle:
            self.refuse(machine, f"{node.id} is {'a' if value.bundle else 'no'} bundle")

    def meet(self, machine: Machine, moved: Send | Recv) -> None:
        here, is_send = machine.plan.device, isinstance(moved, Send)
        ends = (here, moved.peer) if is_send else (moved.peer, here)
        if moved.peer not in self.machines:
            self.refuse(machine, f"there is no device {moved.peer}")
        for sent_by, got_by in self.wires.moved((moved.stream, *ends), (here, machine.at)):
            self.pair(machine, sent_by, got_by)

    def pair(self, machine: Machine, sent: Event, got: Event) -> None:
        one, other = (self.machines[d].plan.instructions[k] for d, k in (sent, got))
        assert isinstance(one, Send) and isinstance(other, Recv)
        if one.node != other.node:
            what = f"device {sent[0]} sends {one.value} where device {got[0]} expects {other.value}"
            self.refuse(machine, what, sent, got)
        self.end(sent, got)

    def reduce(self, machine: Machine, reduce: Reduce) -> None:
        kind = Kind.REDUCE_SCATTER if reduce.scatter else Kind.ALL_REDUCE
        node = self.collective(machine, reduce, kind)
        self.compare(machine, [reduce.value], node.reads)
        self.take(machine, reduce.value)
        self.write(machine, reduce.into, {node.writes[0]})
        self.join(machine, reduce)

    def gather(self, machine: Machine, gather: Gather) -> None:
        node = self.collective(machine, gather, Kind.ALL_GATHER)
        self.compare(machine, [gather.value], node.reads)
        machine.used.setdefault(gather.value, []).append(machine.at)
        known = self.dag.values[node.writes[0]]
        if gather.shapes != tuple((spec.shape, spec.dtype) for spec in known.specs):
            self.refuse(machine, f"{gather.into} has other shapes")
        self.fill(machine, gather)
        self.write(machine, gather.into, {node.writes[0]})
        self.join(machine, gather)

    def fill(self, machine: Machine, gather: Gather) -> None:
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

    def collective(self, machine: Machine, one: Reduce | Gather, kind: Kind) -> Collective:
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

    def join(self, machine: Machine, one: Reduce | Gather | Exchange) -> None:
        """It ends when all of the group are at it; they must come in the same order."""
        here, event = self.here.of(one.group), (machine.plan.device, machine.at)
        for heads in self.wires.joined((one.stream, one.group), here, event):
            nodes = {d: self.machines[d].plan.instructions[k].node for d, k in heads}  # type: ignore[union-attr]
            if len(set(nodes.values())) > 1:
                which = ", ".join(f"device {d} is at {node}" for d, node in nodes.items())
                self.refuse(machine, f"on {one.stream}, {which}", *heads)
            self.end(*heads)

    def exchange(self, machine: Machine, one: Exchange) -> None:
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
        self.join(machine, one)
