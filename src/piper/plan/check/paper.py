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
from piper.ir.nodes import Compute, Totals
from piper.ir.nodes import Update as UpdateNode
from piper.names import COMPUTE
from piper.plan.check.excerpts import last_end
from piper.plan.check.explain import explained
from piper.plan.check.machine import Machine
from piper.plan.check.meetings import Meetings
from piper.plan.check.wires import Event
from piper.plan.instructions import (
    Add,
    Exchange,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Recv,
    Reduce,
    Run,
    Send,
    Total,
    Update,
)


@dataclass
class Together(Meetings):
    """All devices, the channels between them, and what has ended."""

    totals: dict[str, list[Event]] = field(default_factory=dict)
    counted: dict[str, list[frozenset[str]]] = field(default_factory=dict)  # by total

    def __post_init__(self) -> None:
        self.handlers: dict[type[Instruction], Callable[[Machine, Any], None]] = {
            Load: self.load, Run: self.compute, Keep: self.keep, Add: self.add, Free: self.free,
            Send: self.transfer, Recv: self.transfer, Total: self.total, Update: self.update,
            Reduce: self.reduce, Gather: self.gather, Exchange: self.exchange,
        }  # fmt: skip
        super().__post_init__()

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
            what = f"it waits for instruction {position}, which comes later"
            self.refuse(machine, what, position)

    def keep(self, machine: Machine, keep: Keep) -> None:
        self.write(machine, keep.into, self.take(machine, keep.value))

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

    def add(self, machine: Machine, add: Add) -> None:
        total, part = self.read(machine, add.into), self.take(machine, add.value)
        if not total.isdisjoint(part):
            made = self.makers(machine, total & part)
            self.refuse(machine, f"{sorted(total & part)[0]} is added twice", *made)
        self.refuse_unsent(machine, add.into)
        total |= part
        machine.made[add.into] = machine.at

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
        if len(here) == len(self.here.of(total.group)):
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
            if buffer not in machine.holds or buffer in machine.states:
                end = last_end(machine.plan, buffer, machine.at)
                self.refuse(machine, f"{buffer} is freed but nothing is in it", end)
            self.refuse_unsent(machine, buffer)
            self.read(machine, buffer)
            del machine.holds[buffer]

    def deadlock(self, stuck: Sequence[Machine]) -> Problem:
        plans = {device: machine.plan for device, machine in self.machines.items()}
        at = {device: machine.at for device, machine in self.machines.items()}
        awaited = {machine.plan.device: self.awaited(machine) for machine in stuck}
        return explained(self.dag, plans, at, awaited, self.here.devices)

    def awaited(self, machine: Machine) -> int:
        """What a device that stands waits for."""
        waits = machine.plan.instructions[machine.at].waits
        return next(w for w in waits if not self.has_ended(machine, w))
