"""What the buffers of all devices hold, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from piper.errors import BUG, PlanError, Problem
from piper.ir.dag import Dag
from piper.ir.naming import replica_buffer
from piper.ir.nodes import Compute, Exchange
from piper.ir.replicas import replicas
from piper.ir.roles import Present
from piper.ir.values import LOADED
from piper.plan.check.excerpts import excerpts, last_end
from piper.plan.check.knowledge import Knowledge, stream_of
from piper.plan.check.machine import Machine, Progress
from piper.plan.inputs import input_buffers
from piper.plan.instructions import Instruction
from piper.plan.rendezvous import Event


@dataclass
class Contents(Progress):
    """One device: how far it is, and what its buffers hold."""

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


@dataclass(kw_only=True)
class Paper(Machine[Contents]):
    """All devices, and the DAG that they must compute."""

    dag: Dag
    here: Present  # who must have a plan

    def __post_init__(self) -> None:
        self.replicas = replicas(node.devices for node in self.dag.computes if node.devices)
        self.inputs = input_buffers(self.dag)

    def pending(self, device: Contents, one: Instruction) -> Event | None:
        for position in one.waits:
            if position >= device.at:
                what = f"it waits for instruction {position}, which comes later"
                self.refuse(device, what, position)
        return super().pending(device, one)

    def expected(self, machine: Contents, node: Compute | Exchange) -> Sequence[Sequence[str]]:
        """What a node reads; on a device with several replicas, inputs of its own replica."""
        assert node.devices is not None
        replica, of = self.replicas.place(node.devices, machine.plan.device)
        if of == 1 or not replica:
            return node.reads
        known = self.dag.values
        return [
            [replica_buffer(v, replica) if known[v].role in LOADED else v for v in total]
            for total in node.reads
        ]

    def refuse(self, machine: Contents, what: str, *others: int | Event | None) -> NoReturn:
        """`others`: what else to show, instructions of this device (numbers) or of any (events)."""
        device = machine.plan.device
        events = [(device, k) if isinstance(k, int) else k for k in others if k is not None]
        picture = self.picture((device, machine.at), *events)
        raise PlanError(f"device {device}", Problem(f"{what}\n{picture}", BUG))

    def picture(self, here: Event, *others: Event) -> str:
        """The plans around these instructions."""
        plans = {device: self.devices[device].plan for device, _ in (here, *others)}
        return excerpts(plans, here, *others)

    def write(self, machine: Contents, buffer: str, content: set[str]) -> None:
        if buffer in machine.holds:
            made = machine.made.get(buffer)
            self.refuse(machine, f"{buffer} is written while it is still in use", made)
        machine.holds[buffer] = content
        machine.made[buffer] = machine.at

    def read(self, machine: Contents, buffer: str) -> set[str]:
        """What a buffer holds; refused if it is empty, or not there yet for all that is known."""
        if buffer not in machine.holds:
            end = last_end(machine.plan, buffer, machine.at)
            self.refuse(machine, f"{buffer} is read but nothing is in it", end)
        made, stream = machine.made.get(buffer), self.stream(machine)
        if made is not None and not machine.knows.has(stream, made):
            self.refuse(machine, f"{buffer} is read before it is there", made)
        return machine.holds[buffer]

    def stream(self, machine: Contents) -> str:
        return stream_of(machine.plan.instructions[machine.at])

    def take(self, machine: Contents, buffer: str) -> set[str]:
        content = self.read(machine, buffer)
        self.refuse_unsent(machine, buffer)
        del machine.holds[buffer]
        return content

    def once(self, machine: Contents, node: str) -> None:
        if node in machine.ran:
            self.refuse(machine, f"{node} runs twice", machine.ran[node])
        machine.ran[node] = machine.at

    def compare(
        self, machine: Contents, buffers: Sequence[str], wanted: Sequence[Sequence[str]]
    ) -> None:
        if len(buffers) != len(wanted):
            self.refuse(machine, f"it reads {len(buffers)} values instead of {len(wanted)}")
        for buffer, parts in zip(buffers, wanted, strict=True):
            found = self.read(machine, buffer)
            if found != set(parts):
                what = f"{buffer} {difference(found, set(parts))}"
                self.refuse(machine, what, *self.makers(machine, found ^ set(parts)))

    def makers(self, machine: Contents, values: set[str]) -> list[int]:
        """Where this device made what is missing or does not belong, two at most."""
        ran = (machine.ran.get(self.dag.producers.get(v, "")) for v in sorted(values))  # type: ignore[call-overload]
        return [position for position in ran if position is not None][:2]

    def refuse_unsent(self, machine: Contents, buffer: str) -> None:
        """A buffer that is being sent or read must neither change nor end."""
        stream = self.stream(machine)
        for send in machine.used.get(buffer, ()):
            if not machine.knows.has(stream, send):
                self.refuse(machine, f"{buffer} changes or ends while it is being sent", send)
        read = machine.read_at.get(buffer)
        if read is not None and not machine.knows.has(stream, read):
            self.refuse(machine, f"{buffer} changes while it is in use", read)


def difference(found: set[str], wanted: set[str]) -> str:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    parts = [f"lacks {missing[0]}"] if missing else []
    parts += [f"holds {extra[0]}, which does not belong there"] if extra else []
    return " and ".join(parts)
