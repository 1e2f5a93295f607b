"""What a check has proven, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.ir.dag import Dag
from piper.ir.values import Role
from piper.names import Device
from piper.plan.check.check import checked
from piper.plan.check.paper import Together
from piper.plan.instructions import (
    Exchange,
    Free,
    Gather,
    Instruction,
    Plan,
    Reduce,
    Run,
    Send,
    Update,
)


@dataclass(frozen=True, slots=True)
class Proof:
    """What was seen to meet, to end and to be counted when all plans ran together on paper."""

    devices: int
    roles: int  # devices whose plans were run, for all that do the same
    nodes: int
    instructions: int
    passes: int  # forwards and backwards, on all devices
    messages: int  # sends that met their receives, in order
    collectives: int  # reductions and gathers that all of their group came to, in the same order
    exchanges: int  # of experts' rows, likewise
    orders: int  # temporal edges that every device kept
    gradients: int  # contributions of passes to parameters, each counted exactly once
    updates: int
    buffers: int  # freed exactly once

    def __str__(self) -> str:
        meetings = f"{self.messages:,} messages met their receives in order"
        if self.collectives + self.exchanges:
            met = f"{self.collectives:,} collectives and {self.exchanges:,} exchanges of rows"
            meetings += f", {met} all of their group, in the same order"
        few = f" in {self.roles:,} roles" if self.roles < self.devices else ""
        return "\n".join([
            f"ok: {self.devices:,} devices{few}, {self.nodes:,} nodes, "
            f"{self.instructions:,} instructions, run together on paper",
            f"  no deadlock: {meetings}",
            f"  nothing lost or doubled: {self.passes:,} passes, and {self.gradients:,} gradients "
            f"counted once each in {self.updates:,} updates",
            f"  nothing leaks: {self.buffers:,} buffers freed once each",
            f"  {self.orders:,} orders kept",
        ])  # fmt: skip


def prove(dag: Dag, plans: Sequence[Plan], devices: Sequence[Device] | None = None) -> Proof:
    """Check the plans, and count what was seen; arguments and errors are those of `check`."""
    together = checked(dag, plans, devices)
    ended = list(met(together))
    return Proof(
        devices=len(dag.devices),
        roles=len(plans),
        nodes=len(dag.nodes),
        instructions=sum(machine.at for machine in together.devices.values()),
        passes=count(plans, Run),
        messages=sum(isinstance(one, Send) for _, one in ended),
        collectives=len({(o.node, o.group) for _, o in ended if isinstance(o, Reduce | Gather)}),
        exchanges=len({(o.node, o.group) for _, o in ended if isinstance(o, Exchange)}),
        orders=len(dag.precedences),
        gradients=contributions(together),
        updates=count(plans, Update),
        buffers=freed(plans),
    )


def met(together: Together) -> Iterator[tuple[int, Instruction]]:
    """What has ended together with another side of it."""
    for device, position in together.ended:
        yield device, together.devices[device].plan.instructions[position]


def count(plans: Sequence[Plan], kind: type[Instruction]) -> int:
    return sum(isinstance(one, kind) for plan in plans for one in plan.instructions)


def freed(plans: Sequence[Plan]) -> int:
    return sum(
        len(one.values) for plan in plans for one in plan.instructions if isinstance(one, Free)
    )


def contributions(together: Together) -> int:
    """Gradients that passes made on the devices where they ran."""
    values = together.dag.values
    made = {
        node.id: sum(values[v].role is Role.WEIGHT_GRADIENT for v in node.writes)
        for node in together.dag.computes
    }
    ran = (made.get(name, 0) for machine in together.devices.values() for name in machine.ran)  # type: ignore[call-overload]
    return sum(ran)
