"""Run all plans together on paper, and compare with the DAG they came from.

Every buffer holds the set of DAG values that were added up in it, so a plan that lost, doubled or
swapped something is found whoever made it. Sends and receives meet in order on their channel; a
device goes on only when what it waits for has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from piper.errors import PlanError, Problem
from piper.ir.dag import Dag
from piper.ir.nodes import Compute, Totals, Transfer
from piper.ir.nodes import Update as UpdateNode
from piper.names import COMPUTE, Device
from piper.plan.instructions import (
    Add, Free, Instruction, Keep, Load, Plan, Recv, Run, Send, Total, Update, line,
)  # fmt: skip

FIX = "compile the strategy again and run the plans as they are"
Channel = tuple[str, Device, Device]  # stream, sender, receiver
Event = tuple[Device, int]  # an instruction of a device


def check(dag: Dag, plans: Sequence[Plan]) -> None:
    """Refuse plans that, run together, would hang or compute something else than the DAG."""
    together = Together(dag, {plan.device: Machine(plan) for plan in plans})
    together.run()
    for rule in (nothing_is_left, everything_ran_once, orders_are_kept, states_are_new):
        problems = list(rule(together))
        if problems:
            raise PlanError("plans", *problems[:8])


@dataclass
class Machine:
    """One device: how far it is, and what its buffers hold."""

    plan: Plan
    at: int = 0
    holds: dict[str, set[str]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # buffer -> instruction that wrote it
    used: dict[str, list[int]] = field(default_factory=dict)  # buffer -> sends that read it
    waited: set[int] = field(default_factory=set)  # instructions known to have ended
    ran: dict[str, int] = field(default_factory=dict)  # node -> instruction

    def __post_init__(self) -> None:
        self.states = {state.value for state in self.plan.states}
        self.holds.update((state, {state}) for state in self.states)


@dataclass
class Together:
    """All devices, the channels between them, and what has ended."""

    dag: Dag
    machines: dict[Device, Machine]
    ended: set[Event] = field(default_factory=set)
    queues: dict[Channel, tuple[deque[Event], deque[Event]]] = field(default_factory=dict)
    totals: dict[str, list[Event]] = field(default_factory=dict)
    asleep: dict[Event, Device] = field(default_factory=dict)  # who waits for it
    woken: list[Device] = field(default_factory=list)

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
                if (device, position) not in self.ended:
                    self.refuse_future(machine, position)
                    self.asleep[device, position] = device
                    return
            machine.waited.update(instruction.waits)
            self.step(machine, instruction)
            if instruction.stream == COMPUTE:
                self.ended.add((device, machine.at))
            machine.at += 1

    def refuse_future(self, machine: Machine, position: int) -> None:
        if position >= machine.at:
            self.refuse(machine, f"it waits for instruction {position}, which comes later")

    def end(self, *events: Event) -> None:
        """These have ended; whoever waits for one may go on."""
        self.ended.update(events)
        self.woken += [self.asleep.pop(event) for event in events if event in self.asleep]

    def step(self, machine: Machine, instruction: Instruction) -> None:
        match instruction:
            case Load():
                self.write(machine, instruction.value, {instruction.value})
            case Run():
                self.compute(machine, instruction)
            case Keep():
                self.write(machine, instruction.into, self.take(machine, instruction.value))
            case Add():
                self.add(machine, instruction)
            case Send() | Recv():
                self.transfer(machine, instruction)
            case Total():
                self.total(machine, instruction)
            case Update():
                self.update(machine, instruction)
            case Free():
                self.free(machine, instruction)

    def refuse(self, machine: Machine, what: str) -> None:
        where = f"device {machine.plan.device}"
        raise PlanError(where, Problem(f"{what}\n{machine.plan.excerpt(machine.at)}", FIX))

    def write(self, machine: Machine, buffer: str, content: set[str]) -> None:
        if buffer in machine.holds:
            self.refuse(machine, f"{buffer} is written while it is still in use")
        machine.holds[buffer] = content
        machine.made[buffer] = machine.at

    def read(self, machine: Machine, buffer: str) -> set[str]:
        """What a buffer holds; refused if it is empty, or still on its way."""
        if buffer not in machine.holds:
            self.refuse(machine, f"{buffer} is read but nothing is in it")
        made = machine.made.get(buffer)
        if made is not None and machine.plan.instructions[made].stream != COMPUTE:
            if made not in machine.waited:
                self.refuse(machine, f"{buffer} is read before it has arrived")
        return machine.holds[buffer]

    def take(self, machine: Machine, buffer: str) -> set[str]:
        content = self.read(machine, buffer)
        self.refuse_unsent(machine, buffer, ())
        del machine.holds[buffer]
        return content

    def once(self, machine: Machine, node: str) -> None:
        if node in machine.ran:
            self.refuse(machine, f"{node} runs twice")
        machine.ran[node] = machine.at

    def compute(self, machine: Machine, run: Run) -> None:
        node = self.dag.nodes.get(run.node)  # type: ignore[call-overload]
        if not isinstance(node, Compute) or machine.plan.device not in (node.devices or ()):
            self.refuse(machine, f"{run.node} does not belong on device {machine.plan.device}")
        self.once(machine, run.node)
        self.compare(machine, run.reads, node.reads)
        for buffer, value in zip(run.writes, node.writes, strict=True):
            self.write(machine, buffer, {value})

    def compare(self, machine: Machine, buffers: Sequence[str], wanted: Sequence[Sequence[str]]) -> None:
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
        self.refuse_unsent(machine, add.into, ())
        total |= part
        machine.made[add.into] = machine.at

    def refuse_unsent(self, machine: Machine, buffer: str, waits: Sequence[int]) -> None:
        """A buffer that is being sent must neither change nor end."""
        for send in machine.used.get(buffer, ()):
            if send not in waits and send not in machine.waited:
                self.refuse(machine, f"{buffer} changes or ends while it is being sent")

    def transfer(self, machine: Machine, moved: Send | Recv) -> None:
        node = self.dag.nodes.get(moved.node)  # type: ignore[call-overload]
        if not isinstance(node, Transfer):
            self.refuse(machine, f"{moved.node} is no transfer")
        self.once(machine, moved.node)
        if isinstance(moved, Send):
            self.refuse_early_send(machine, moved)
            self.compare(machine, [moved.value], node.reads)
            machine.used.setdefault(moved.value, []).append(machine.at)
        else:
            machine.holds.pop(moved.value, None) if moved.value in machine.states else None
            self.write(machine, moved.value, {node.writes[0]})
        self.meet(machine, moved)

    def refuse_early_send(self, machine: Machine, send: Send) -> None:
        made = machine.made.get(send.value)
        if made is not None and made not in send.waits and made not in machine.waited:
            self.refuse(machine, f"{send.value} is sent before it is ready")

    def meet(self, machine: Machine, moved: Send | Recv) -> None:
        here, is_send = machine.plan.device, isinstance(moved, Send)
        ends = (here, moved.peer) if is_send else (moved.peer, here)
        if moved.peer not in self.machines:
            self.refuse(machine, f"there is no device {moved.peer}")
        sends, recvs = self.queues.setdefault((moved.stream, *ends), (deque(), deque()))
        (sends if is_send else recvs).append((here, machine.at))
        while sends and recvs:
            self.pair(machine, sends.popleft(), recvs.popleft())

    def pair(self, machine: Machine, sent: Event, got: Event) -> None:
        one, other = (self.machines[d].plan.instructions[k] for d, k in (sent, got))
        assert isinstance(one, Send) and isinstance(other, Recv)
        if one.node != other.node:
            what = f"device {sent[0]} sends {one.value} where device {got[0]} expects {other.value}"
            self.refuse(machine, what)
        self.end(sent, got)

    def total(self, machine: Machine, total: Total) -> None:
        self.once(machine, total.node)
        node = self.dag.nodes.get(total.node)  # type: ignore[call-overload]
        if not isinstance(node, Totals):
            self.refuse(machine, f"{total.node} is no total")
        self.compare(machine, [v for v, _ in total.losses], [[node.reads[0][k]] for _, k in total.losses])
        wanted = {frozenset(parts) for parts in node.reads[1:]}
        for buffer in total.grads:
            if frozenset(self.read(machine, buffer)) not in wanted:
                self.refuse(machine, f"{buffer} is no part of {total.node}")
        here = self.totals.setdefault(total.node, [])
        here.append((machine.plan.device, machine.at))
        if len(here) == len(total.group):
            self.end(*here)

    def update(self, machine: Machine, update: Update) -> None:
        node = self.dag.nodes.get(update.node)  # type: ignore[call-overload]
        if not isinstance(node, UpdateNode) or machine.plan.device not in (node.devices or ()):
            self.refuse(machine, f"{update.node} does not belong on device {machine.plan.device}")
        self.once(machine, update.node)
        self.compare(machine, [update.grad], node.reads[:1])
        state = node.writes[0].removesuffix("'")
        machine.holds[state] = {node.writes[0]}
        machine.made[state] = machine.at

    def free(self, machine: Machine, free: Free) -> None:
        for buffer in free.values:
            self.refuse_unsent(machine, buffer, free.waits)
            if buffer not in machine.holds or buffer in machine.states:
                self.refuse(machine, f"{buffer} is freed but nothing is in it")
            del machine.holds[buffer]

    def deadlock(self, stuck: Sequence[Machine]) -> Problem:
        rows = "".join(f"\n    {self.stuck_at(machine)}" for machine in stuck)
        return Problem(f"these devices wait for each other for ever{rows}", FIX)

    def stuck_at(self, machine: Machine) -> str:
        device, instruction = machine.plan.device, machine.plan.instructions[machine.at]
        first = next(w for w in instruction.waits if (device, w) not in self.ended)
        return f"device {device} at «{line(instruction)}» waits for «{line(machine.plan.instructions[first])}»"


def difference(found: set[str], wanted: set[str]) -> str:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    parts = [f"lacks {missing[0]}"] if missing else []
    parts += [f"holds {extra[0]}, which does not belong there"] if extra else []
    return " and ".join(parts)


def nothing_is_left(together: Together) -> Iterator[Problem]:
    for (stream, source, target), (sends, recvs) in together.queues.items():
        for device, at in chain(sends, recvs):
            text = line(together.machines[device].plan.instructions[at])
            yield Problem(f"«{text}» on {stream} from {source} to {target} meets nothing", FIX)
    for machine in together.machines.values():
        for buffer in machine.holds:
            if buffer not in machine.states:
                yield Problem(f"device {machine.plan.device} never frees {buffer}", FIX)


def everything_ran_once(together: Together) -> Iterator[Problem]:
    for node in together.dag.nodes.values():
        ends = (*node.source, *node.devices) if isinstance(node, Transfer) else node.devices or ()
        for device in dict.fromkeys(ends):
            if device not in together.machines or node.id not in together.machines[device].ran:
                yield Problem(f"{node.id} never runs on device {device}", FIX)


def orders_are_kept(together: Together) -> Iterator[Problem]:
    for precedence in together.dag.precedences:
        for device in together.dag.nodes[precedence.before[0]].devices or ():
            ran = together.machines[device].ran
            before = [(ran[node], node) for node in precedence.before if node in ran]
            after = [(ran[node], node) for node in precedence.after if node in ran]
            if before and after and max(before) > min(after):
                what = f"device {device} runs {min(after)[1]} before {max(before)[1]}"
                yield Problem(f"{what}, against {precedence.maker}", FIX)


def states_are_new(together: Together) -> Iterator[Problem]:
    """Every copy of every updated parameter ends the step with its new value."""
    updated = {node.bucket for node in together.dag.nodes.values() if isinstance(node, UpdateNode)}
    for machine in together.machines.values():
        for state in machine.plan.states:
            if state.bucket in updated and machine.holds[state.value] != {f"{state.value}'"}:
                yield Problem(f"{state.value} on device {machine.plan.device} stays old", FIX)
