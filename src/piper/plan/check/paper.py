"""Run all plans together on paper: what each buffer holds, who waits for whom.

Every buffer holds the set of DAG values that were added up in it. Sends and receives meet in order
on their channel; a device goes on only when what it waits for has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from piper.errors import PlanError, Problem
from piper.ir.nodes import Compute, Totals
from piper.ir.nodes import Update as UpdateNode
from piper.plan.check.contents import Contents
from piper.plan.check.excerpts import last_end
from piper.plan.check.explain import explained
from piper.plan.check.meetings import Meetings
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


@dataclass(kw_only=True)
class Together(Meetings):
    """All devices, the channels between them, and what has ended."""

    counted: dict[str, list[frozenset[str]]] = field(default_factory=dict)  # by total

    def finish(self) -> None:
        """Run all plans to their end."""
        stuck = self.run()
        if stuck:
            raise PlanError("plans", self.deadlock(stuck))

    def do(self, device: Contents, one: Instruction) -> None:
        if one.waits:
            device.knows.wait(device.at, one)
        match one:
            case Run():
                self.compute(device, one)
            case Free():
                self.free(device, one)
            case Load():
                self.load(device, one)
            case Keep():
                self.keep(device, one)
            case Add():
                self.add(device, one)
            case Send() | Recv():
                self.transfer(device, one)
            case Reduce():
                self.reduce(device, one)
            case Gather():
                self.gather(device, one)
            case Exchange():
                self.exchange(device, one)
            case Total():
                self.total(device, one)
            case Update():
                self.update(device, one)
            case _:
                assert_never(one)

    def keep(self, machine: Contents, keep: Keep) -> None:
        self.write(machine, keep.into, self.take(machine, keep.value))

    def load(self, machine: Contents, load: Load) -> None:
        if load.value not in self.inputs:
            self.refuse(machine, f"there is no input {load.value}")
        known, replica = self.inputs[load.value]
        part, parts = replica * known.parts + known.part, len(self.replicas.feeds[0]) * known.parts
        if (load.role, load.index, load.part, load.parts) != (
            known.role, known.index, part, parts,
        ):  # fmt: skip
            self.refuse(machine, f"it loads something else than {load.value}")
        self.write(machine, load.value, {load.value})

    def compute(self, machine: Contents, run: Run) -> None:
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

    def add(self, machine: Contents, add: Add) -> None:
        total, part = self.read(machine, add.into), self.take(machine, add.value)
        if not total.isdisjoint(part):
            made = self.makers(machine, total & part)
            self.refuse(machine, f"{sorted(total & part)[0]} is added twice", *made)
        self.refuse_unsent(machine, add.into)
        total |= part
        machine.made[add.into] = machine.at

    def total(self, machine: Contents, total: Total) -> None:
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
        self.meet(machine, total)

    def refuse_wrong_parts(self, machine: Contents, total: Total, node: Totals) -> None:
        """Every loss is weighed as the microbatch of the replica that it is of."""
        all_losses = node.reads[0]
        for buffer, part in total.losses:
            replica, k = divmod(part, len(all_losses))
            self.compare(machine, [buffer], [[all_losses[k]]])
            devices = self.dag.nodes[self.dag.producers[all_losses[k]]].devices or ()
            if self.replicas.place(devices, machine.plan.device)[0] != replica:
                self.refuse(machine, f"{buffer} is counted for another replica")

    def update(self, machine: Contents, update: Update) -> None:
        node = self.dag.nodes.get(update.node)  # type: ignore[call-overload]
        if not isinstance(node, UpdateNode) or machine.plan.device not in (node.devices or ()):
            self.refuse(machine, f"{update.node} does not belong on device {machine.plan.device}")
        self.once(machine, update.node)
        self.compare(machine, [update.grad], node.reads[:1])
        state = self.dag.values[node.writes[0]].state
        assert state is not None
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

    def free(self, machine: Contents, free: Free) -> None:
        for buffer in free.values:
            if buffer not in machine.holds or buffer in machine.states:
                end = last_end(machine.plan, buffer, machine.at)
                self.refuse(machine, f"{buffer} is freed but nothing is in it", end)
            self.refuse_unsent(machine, buffer)
            self.read(machine, buffer)
            del machine.holds[buffer]

    def deadlock(self, stuck: Sequence[Contents]) -> Problem:
        plans = {device: one.plan for device, one in self.devices.items()}
        at = {device: one.at for device, one in self.devices.items()}
        awaited = {one.plan.device: self.awaited(one) for one in stuck}
        return explained(self.dag, plans, at, awaited, self.here.devices)

    def awaited(self, device: Contents) -> int:
        """What a device that stands waits for."""
        event = self.pending(device, device.plan.instructions[device.at])
        assert event is not None
        return event[1]
