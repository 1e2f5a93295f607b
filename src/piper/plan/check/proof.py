"""What a check has proved, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.ir.dag import Dag
from piper.ir.values import Role
from piper.names import Device, amount
from piper.plan.check.check import checked
from piper.plan.check.symbolic_execution import SymbolicExecution
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
    """What was matched, completed and counted when all plans were executed together."""

    devices: int
    roles: int  # devices whose plans were executed, each for all devices of its role
    nodes: int
    instructions: int
    passes: int  # forwards and backwards, on all devices
    messages: int  # sends that matched their receives, in order
    collectives: int  # reductions and gathers that their whole group joined, in the same order
    exchanges: int  # token all-to-alls, likewise
    orders: int  # temporal edges that every device kept
    message_orders: int  # of these, those of orders that name messages or updates
    gradients: int  # contributions of passes to parameters, each counted exactly once
    updates: int
    buffers: int  # freed exactly once

    def __str__(self) -> str:
        roles = f" in {amount(self.roles, 'role')}" if self.roles < self.devices else ""
        return "\n".join([
            f"ok: {amount(self.devices, 'device')}{roles}, {amount(self.nodes, 'node')}, "
            f"{amount(self.instructions, 'instruction')}, executed together symbolically",
            f"  no deadlock: {self.matches}",
            f"  nothing lost or duplicated: {amount(self.passes, 'pass', 'passes')}, and "
            f"{amount(self.gradients, 'gradient')} counted once each in "
            f"{amount(self.updates, 'update')}",
            f"  no leaks: {amount(self.buffers, 'buffer')} freed once each",
            f"  {self.kept}",
        ])  # fmt: skip

    @property
    def kept(self) -> str:
        if not self.orders:
            return "no order to keep: the strategy names none, so Piper chose one"
        many = self.message_orders
        rest = f", {many:,} of them with messages or updates" if many else ""
        slots = amount(self.orders, "pair")
        return f"the order of the schedule kept: {slots} of neighbouring slots{rest}"

    @property
    def matches(self) -> str:
        sends = f"{amount(self.messages, 'send')} matched in order"
        if not self.collectives + self.exchanges:
            return sends
        collectives = amount(self.collectives, "collective")
        exchanges = amount(self.exchanges, "token all-to-all")
        return f"{sends}, {collectives} and {exchanges} joined by their whole group in order"


def prove(dag: Dag, plans: Sequence[Plan], devices: Sequence[Device] | None = None) -> Proof:
    """Check the plans, and count what was proved. Arguments and errors are those of `check`."""
    execution = checked(dag, plans, devices)
    ended = list(met(execution))
    return Proof(
        devices=len(dag.devices),
        roles=len(plans),
        nodes=len(dag.nodes),
        instructions=sum(device.at for device in execution.devices.values()),
        passes=count(plans, Run),
        messages=sum(isinstance(one, Send) for _, one in ended),
        collectives=len({(o.node, o.group) for _, o in ended if isinstance(o, Reduce | Gather)}),
        exchanges=len({(o.node, o.group) for _, o in ended if isinstance(o, Exchange)}),
        orders=len(dag.precedences),
        message_orders=sum(order.partial for order in dag.precedences),
        gradients=contributions(execution),
        updates=count(plans, Update),
        buffers=freed(plans),
    )


def met(execution: SymbolicExecution) -> Iterator[tuple[int, Instruction]]:
    """Every message that completed, with its device."""
    for device, position in execution.ended:
        yield device, execution.devices[device].plan.instructions[position]


def count(plans: Sequence[Plan], kind: type[Instruction]) -> int:
    return sum(isinstance(one, kind) for plan in plans for one in plan.instructions)


def freed(plans: Sequence[Plan]) -> int:
    return sum(
        len(one.values) for plan in plans for one in plan.instructions if isinstance(one, Free)
    )


def contributions(execution: SymbolicExecution) -> int:
    """How many parameter gradients the backward passes produced, on all devices."""
    found = 0
    for one in execution.wanted:
        values = one.dag.values
        made: dict[str, int] = {
            node.id: sum(values[v].role is Role.WEIGHT_GRADIENT for v in node.writes)
            for node in one.dag.computes
        }
        devices = (execution.devices[device] for device in one.devices)
        found += sum(made.get(name, 0) for device in devices for name in device.ran)
    return found
