"""Run all plans together on paper: what each buffer holds, who waits for whom.

Every buffer holds the set of DAG values that were added up in it. Sends and receives meet in order
on their channel; a device goes on only when what it waits for has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from piper.errors import PlanError, Problem
from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Compute, Kind, Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.ir.replicas import replicas
from piper.ir.spec import BUG
from piper.ir.values import Origin
from piper.names import COMPUTE, Device
from piper.plan.instructions import (
    Add,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    Total,
    Update,
    line,
)
from piper.plan.knowledge import Knowledge, stream_of
from piper.plan.pool import offsets
from piper.plan.wires import Event, Wires, difference, sent


@dataclass
class Machine:
    """One device: how far it is, and what its buffers hold."""

    plan: Plan
    at: int = 0
    holds: dict[str, set[str]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # buffer -> instruction that wrote it
    used: dict[str, list[int]] = field(default_factory=dict)  # buffer -> sends that read it
    rewritten: set[str] = field(default_factory=set)  # what other streams write again
    read_at: dict[str, int] = field(default_factory=dict)  # of these, the last run that read it
    ran: dict[str, int] = field(default_factory=dict)  # node -> instruction
    filled: dict[int, str] = field(default_factory=dict)  # buffer of the plan -> what is in it

    def __post_init__(self) -> None:
        self.knows = Knowledge(self.plan)
        self.states = {state.value for state in self.plan.states}
        self.holds.update((state, {state}) for state in self.states)
        self.rewritten |= self.states


@dataclass
class Together:
    """All devices, the channels between them, and what has ended."""

    dag: Dag
    machines: dict[Device, Machine]
    ended: set[Event] = field(default_factory=set)
    wires: Wires = field(default_factory=Wires)
    totals: dict[str, list[Event]] = field(default_factory=dict)
    asleep: dict[Event, Device] = field(default_factory=dict)  # who waits for it
    woken: list[Device] = field(default_factory=list)
    counted: dict[str, list[frozenset[str]]] = field(default_factory=dict)  # by total

    def __post_init__(self) -> None:
        self.handlers: dict[type[Instruction], Callable[[Machine, Any], None]] = {
            Load: self.load, Run: self.compute, Keep: self.keep, Add: self.add, Free: self.free,
            Send: self.transfer, Recv: self.transfer, Total: self.total, Update: self.update,
            Reduce: self.reduce, Gather: self.gather,
        }  # fmt: skip
        self.replicas = replicas(node.devices for node in self.dag.computes if node.devices)

    def run(self) -> None:
        awake = deque(self.machines)
        while awake:
            self.advance(self.machines[awake.popleft()])
            awake.extend(self.woken)
            self.woken.clear()
        stuck = [m for m in self.machines.values() if m.at < len(m.plan.instructions)]
        if stuck:
            raise PlanError("plans", self.deadlock(stuck))

    def advance(self, machine: Machine) -> None:
        """Go on until something that is waited for has not ended."""
        device, instructions = machine.plan.device, machine.plan.instructions
        while machine.at < len(instructions):
            instruction = instructions[machine.at]
            for position in instruction.waits:
                self.refuse_future(machine, position)
                if not self.has_ended(machine, position):
                    self.asleep[device, position] = device
                    return
            if instruction.waits:
                machine.knows.wait(machine.at, instruction)
            self.handlers[type(instruction)](machine, instruction)
            machine.at += 1

    def has_ended(self, machine: Machine, position: int) -> bool:
        """What came earlier on the compute stream has; the rest is written down when it does."""
        if machine.plan.instructions[position].stream == COMPUTE:
            return True
        return (machine.plan.device, position) in self.ended

    def refuse_future(self, machine: Machine, position: int) -> None:
        if position >= machine.at:
            self.refuse(machine, f"it waits for instruction {position}, which comes later")

    def end(self, *events: Event) -> None:
        """These have ended; whoever waits for one may go on."""
        self.ended.update(events)
        self.woken += [self.asleep.pop(event) for event in events if event in self.asleep]

    def keep(self, machine: Machine, keep: Keep) -> None:
        self.write(machine, keep.into, self.take(machine, keep.value))

    def refuse(self, machine: Machine, what: str) -> None:
        where = f"device {machine.plan.device}"
        raise PlanError(where, Problem(f"{what}\n{machine.plan.excerpt(machine.at)}", BUG))

    def write(self, machine: Machine, buffer: str, content: set[str]) -> None:
        if buffer in machine.holds:
            self.refuse(machine, f"{buffer} is written while it is still in use")
        machine.holds[buffer] = content
        machine.made[buffer] = machine.at

    def read(self, machine: Machine, buffer: str) -> set[str]:
        """What a buffer holds; refused if it is empty, or not there yet for all that is known."""
        if buffer not in machine.holds:
            self.refuse(machine, f"{buffer} is read but nothing is in it")
        made, stream = machine.made.get(buffer), self.stream(machine)
        if made is not None and not machine.knows.has(stream, made):
            self.refuse(machine, f"{buffer} is read before it is there")
        return machine.holds[buffer]

    def stream(self, machine: Machine) -> str:
        return stream_of(machine.plan.instructions[machine.at])

    def take(self, machine: Machine, buffer: str) -> set[str]:
        content = self.read(machine, buffer)
        self.refuse_unsent(machine, buffer)
        del machine.holds[buffer]
        return content

    def once(self, machine: Machine, node: str) -> None:
        if node in machine.ran:
            self.refuse(machine, f"{node} runs twice")
        machine.ran[node] = machine.at

    def load(self, machine: Machine, load: Load) -> None:
        name, _, replica = load.value.partition("#")
        known = self.dag.values.get(name)  # type: ignore[call-overload]
        first, of = int(replica or 0), len(self.replicas.feeds[0])
        wanted = known and (
            known.origin, known.index, first * known.parts + known.part, of * known.parts,
        )  # fmt: skip
        if (load.origin, load.index, load.part, load.parts) != wanted or first >= of:
            self.refuse(machine, f"it loads something else than {load.value}")
        self.write(machine, load.value, {load.value})

    def compute(self, machine: Machine, run: Run) -> None:
        node = self.dag.nodes.get(run.node)  # type: ignore[call-overload]
        if not isinstance(node, Compute) or machine.plan.device not in (node.devices or ()):
            self.refuse(machine, f"{run.node} does not belong on device {machine.plan.device}")
        self.once(machine, run.node)
        if (run.region, run.phase) != (node.region, node.phase):
            self.refuse(machine, f"{run.node} is not {run.region} {run.phase}")
        self.compare(machine, run.reads, self.expected(machine, node))
        for buffer in run.reads:
            if buffer in machine.rewritten:
                machine.read_at[buffer] = machine.at
        if len(run.writes) != len(node.writes):
            self.refuse(
                machine, f"it writes {len(run.writes)} values instead of {len(node.writes)}"
            )
        for buffer, value in zip(run.writes, node.writes, strict=True):
            self.write(machine, buffer, {value})

    def expected(self, machine: Machine, node: Compute) -> Sequence[Sequence[str]]:
        """What a node reads; on a device with several replicas, inputs of its own replica."""
        assert node.devices is not None
        replica, of = self.replicas.place(node.devices, machine.plan.device)
        if of == 1 or not replica:
            return node.reads
        given = self.dag.values
        return [
            [v if given[v].origin in (Origin.FLOW, Origin.WEIGHTS) else f"{v}#{replica}" for v in t]
            for t in node.reads
        ]

    def compare(
        self, machine: Machine, buffers: Sequence[str], wanted: Sequence[Sequence[str]]
    ) -> None:
        if len(buffers) != len(wanted):
            self.refuse(machine, f"it reads {len(buffers)} values instead of {len(wanted)}")
        for buffer, parts in zip(buffers, wanted, strict=True):
            found = self.read(machine, buffer)
            if found != set(parts):
                self.refuse(machine, f"{buffer} {difference(found, set(parts))}")

    def add(self, machine: Machine, add: Add) -> None:
        total, part = self.read(machine, add.into), self.take(machine, add.value)
        if not total.isdisjoint(part):
            self.refuse(machine, f"{sorted(total & part)[0]} is added twice")
        self.refuse_unsent(machine, add.into)
        total |= part
        machine.made[add.into] = machine.at

    def refuse_unsent(self, machine: Machine, buffer: str) -> None:
        """A buffer that is being sent or read must neither change nor end."""
        stream = self.stream(machine)
        for send in machine.used.get(buffer, ()):
            if not machine.knows.has(stream, send):
                self.refuse(machine, f"{buffer} changes or ends while it is being sent")
        read = machine.read_at.get(buffer)
        if read is not None and not machine.knows.has(stream, read):
            self.refuse(machine, f"{buffer} changes while it is in use")

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
            self.refuse(machine, what)
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
                self.refuse(machine, f"buffer {gather.buffer} still holds {inside}")
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

    def join(self, machine: Machine, one: Reduce | Gather) -> None:
        """It ends when all of the group are at it; they must come in the same order."""
        for heads in self.wires.joined((one.stream, one.group), (machine.plan.device, machine.at)):
            nodes = {d: self.machines[d].plan.instructions[k].node for d, k in heads}  # type: ignore[union-attr]
            if len(set(nodes.values())) > 1:
                which = ", ".join(f"device {d} is at {node}" for d, node in nodes.items())
                self.refuse(machine, f"on {one.stream}, {which}")
            self.end(*heads)

    def total(self, machine: Machine, total: Total) -> None:
        self.once(machine, total.node)
        node = self.dag.nodes.get(total.node)  # type: ignore[call-overload]
        if not isinstance(node, Totals):
            self.refuse(machine, f"{total.node} is no total")
        if total.group != node.devices or machine.plan.device not in (node.devices or ()):
            self.refuse(machine, f"{total.node} is over devices {list(node.devices or ())}")
        self.refuse_wrong_parts(machine, total, node)
        wanted = {frozenset(parts) for parts in node.reads[1:]}
        for buffer in total.grads:
            if frozenset(self.read(machine, buffer)) not in wanted:
                self.refuse(machine, f"{buffer} is no part of {total.node}")
        counted = [frozenset(self.read(machine, b)) for b in (*dict(total.losses), *total.grads)]
        if len(set(counted)) < len(total.losses) + len(total.grads):
            self.refuse(machine, "something is counted twice")
        self.counted.setdefault(total.node, []).extend(counted)
        here = self.totals.setdefault(total.node, [])
        here.append((machine.plan.device, machine.at))
        if len(here) == len(total.group):
            self.end(*here)

    def refuse_wrong_parts(self, machine: Machine, total: Total, node: Totals) -> None:
        """Every loss is weighed as the microbatch of the replica that it is of."""
        all_losses = node.reads[0]
        for buffer, part in total.losses:
            replica, k = divmod(part, len(all_losses))
            self.compare(machine, [buffer], [[all_losses[k]]])
            devices = self.dag.nodes[self.dag.producers[all_losses[k]]].devices or ()
            if self.replicas.place(devices, machine.plan.device)[0] != replica:
                self.refuse(machine, f"{buffer} is counted for another replica")

    def update(self, machine: Machine, update: Update) -> None:
        node = self.dag.nodes.get(update.node)  # type: ignore[call-overload]
        if not isinstance(node, UpdateNode) or machine.plan.device not in (node.devices or ()):
            self.refuse(machine, f"{update.node} does not belong on device {machine.plan.device}")
        self.once(machine, update.node)
        self.compare(machine, [update.grad], node.reads[:1])
        state = node.writes[0].removesuffix("'")
        if update.bucket != node.bucket or machine.holds.get(state) != {state}:
            self.refuse(machine, f"{update.bucket} is not what {update.node} updates")
        self.refuse_unsent(machine, state)
        if update.clip != (len(node.reads) > 1):
            self.refuse(machine, "clipping is not as compiled")
        if update.clip and not any(
            isinstance(machine.plan.instructions[k], Total) for k in machine.knows.learned
        ):
            self.refuse(machine, "it is clipped before the norm is there")
        machine.holds[state] = {node.writes[0]}
        machine.made[state] = machine.at

    def free(self, machine: Machine, free: Free) -> None:
        for buffer in free.values:
            self.refuse_unsent(machine, buffer)
            self.read(machine, buffer)
            if buffer not in machine.holds or buffer in machine.states:
                self.refuse(machine, f"{buffer} is freed but nothing is in it")
            del machine.holds[buffer]

    def deadlock(self, stuck: Sequence[Machine]) -> Problem:
        rows = "".join(f"\n    {self.stuck_at(machine)}" for machine in stuck)
        return Problem(f"these devices wait for each other for ever{rows}", BUG)

    def stuck_at(self, machine: Machine) -> str:
        device, instruction = machine.plan.device, machine.plan.instructions[machine.at]
        first = next(w for w in instruction.waits if not self.has_ended(machine, w))
        other = machine.plan.instructions[first]
        return f"device {device} at «{line(instruction)}» waits for «{line(other)}»"
