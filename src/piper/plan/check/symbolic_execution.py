"""Symbolic execution of all plans together.

A buffer holds a set of DAG values: those that were added up in it. Sends match receives in order on
their channel. A device goes on only when the messages that it waits for have completed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from piper.errors import PlanError, Problem
from piper.ir.by_device.roles import Present
from piper.ir.naming import TOTALS
from piper.ir.nodes import Compute, Totals
from piper.ir.nodes import Update as UpdateNode
from piper.ir.values import Role
from piper.names import Device, amount
from piper.plan.check.buffer_contents import DeviceBuffers
from piper.plan.check.communication import CommunicationChecks
from piper.plan.check.deadlock import explained
from piper.plan.check.excerpts import last_end
from piper.plan.check.order_checks import OrderChecks
from piper.plan.check.stream_order import stream_of
from piper.plan.instructions import (
    Add,
    Exchange,
    Fetch,
    Free,
    Gather,
    Instruction,
    Keep,
    Load,
    Recv,
    Redistribute,
    Reduce,
    Run,
    Send,
    Slice,
    Store,
    Total,
    Update,
)


@dataclass(kw_only=True)
class SymbolicExecution(CommunicationChecks, OrderChecks):
    """Executes every kind of instruction, and checks each against the DAG."""

    counted: dict[tuple[str, Device], list[frozenset[str]]] = field(
        default_factory=dict
    )  # by all-reduce node and device

    def finish(self) -> None:
        """Run all plans to their end, or explain the deadlock."""
        stuck = self.run()
        if stuck:
            raise PlanError("plans", self.deadlock(stuck))

    def do(self, device: DeviceBuffers, one: Instruction) -> None:
        device.stream = stream = stream_of(one)
        if one.waits:
            device.order.wait(stream, device.at, one.waits)
        if one.node in device.wanted.orders:
            self.keep_orders(device, one)
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
            case Redistribute() | Slice():
                self.redistribute(device, one)
            case Store() | Fetch():
                self.copy(device, one)
            case Total():
                self.total(device, one)
            case Update():
                self.update(device, one)
            case _:
                assert_never(one)

    def keep(self, device: DeviceBuffers, keep: Keep) -> None:
        self.write(device, keep.into, self.take(device, keep.value))

    def load(self, device: DeviceBuffers, load: Load) -> None:
        inputs = device.wanted.inputs
        if load.value not in inputs:
            self.refuse(device, f"there is no input {load.value}")
        known, replica = inputs[load.value]
        part, parts = replica * known.parts + known.part, device.wanted.replicas.parts * known.parts
        index = self.rank(device) if known.role is Role.RANK else known.index
        if (load.role, load.index, load.part, load.parts, load.sizes) != (
            known.role, index, part, parts, known.sizes,
        ):  # fmt: skip
            self.refuse(device, f"it does not load {load.value}")
        self.write(device, load.value, {load.value})

    def rank(self, device: DeviceBuffers) -> int:
        """The position of a device in the groups that divide regions."""
        number = device.plan.device
        groups = (group for how in self.dag.divisions.values() for group in how.groups)
        return next((group.index(number) for group in groups if number in group), 0)

    def compute(self, device: DeviceBuffers, run: Run) -> None:
        node = device.wanted.dag.nodes.get(run.node)  # type: ignore[call-overload]
        if not isinstance(node, Compute) or device.plan.device not in (node.devices or ()):
            self.refuse(device, f"{run.node} does not belong on device {device.plan.device}")
        self.once(device, run.node)
        if (run.region, run.phase) != (node.region, node.phase):
            self.refuse(device, f"{run.node} is not {run.region} {run.phase}")
        self.compare(device, run.reads, self.expected(device, node))
        for buffer in run.reads:
            if buffer in device.rewritten:
                device.read_at[buffer] = device.at
        if len(run.writes) != len(node.writes):
            self.refuse(
                device,
                f"it writes {amount(len(run.writes), 'value')} instead of {len(node.writes)}",
            )
        for buffer, value in zip(run.writes, node.writes, strict=True):
            self.write(device, buffer, {value})

    def add(self, device: DeviceBuffers, add: Add) -> None:
        total, part = self.read(device, add.into), self.take(device, add.value)
        if not total.isdisjoint(part):
            made = self.makers(device, total & part)
            self.refuse(device, f"{sorted(total & part)[0]} is added twice", *made)
        self.refuse_while_sent(device, add.into)
        total |= part
        device.made[add.into] = device.at

    def total(self, device: DeviceBuffers, total: Total) -> None:
        self.once(device, total.node)
        node = device.wanted.dag.nodes.get(total.node)  # type: ignore[call-overload]
        if not isinstance(node, Totals):
            self.refuse(device, f"{total.node} is not the loss and norm all-reduce")
        if total.group != node.devices or device.plan.device not in (node.devices or ()):
            self.refuse(device, f"{total.node} is over devices {list(node.devices or ())}")
        self.refuse_wrong_parts(device, total, node)
        wanted = {frozenset(parts) for parts in node.reads[1:]}
        for buffer in total.grads:
            if frozenset(self.read(device, buffer)) not in wanted:
                self.refuse(device, f"{buffer} is not part of {total.node}")
        counted = [frozenset(self.read(device, b)) for b in (*dict(total.losses), *total.grads)]
        if len(set(counted)) < len(total.losses) + len(total.grads):
            self.refuse(device, "a loss or gradient is counted twice")
        self.counted.setdefault((total.node, device.plan.device), []).extend(counted)
        self.meet(device, total)

    def counted_by(self, node: str, here: Present) -> Iterator[frozenset[str]]:
        """What these devices have counted in the loss and norm all-reduce."""
        for (counting, device), parts in self.counted.items():
            if counting == node and device in here.devices:
                yield from parts

    def refuse_wrong_parts(self, device: DeviceBuffers, total: Total, node: Totals) -> None:
        """Every loss is weighted as a microbatch of its own replica."""
        all_losses, dag = node.reads[0], device.wanted.dag
        for buffer, part in total.losses:
            replica, k = divmod(part, len(all_losses))
            self.compare(device, [buffer], [[all_losses[k]]])
            devices = dag.nodes[dag.producers[all_losses[k]]].devices or ()
            if device.wanted.replicas.place(devices, device.plan.device)[0] != replica:
                self.refuse(device, f"{buffer} is counted for the wrong replica")

    def update(self, device: DeviceBuffers, update: Update) -> None:
        node = device.wanted.dag.nodes.get(update.node)  # type: ignore[call-overload]
        if not isinstance(node, UpdateNode) or device.plan.device not in (node.devices or ()):
            self.refuse(device, f"{update.node} does not belong on device {device.plan.device}")
        self.once(device, update.node)
        self.compare(device, [update.grad], node.reads[:1])
        state = device.wanted.dag.values[node.writes[0]].state
        assert state is not None
        if update.bucket != node.bucket or device.holds.get(state) != {state}:
            self.refuse(device, f"{update.bucket} is not what {update.node} updates")
        if update.parameters != ("" if state in device.states else state):
            self.refuse(device, f"{update.parameters or 'nothing'} was fetched to be updated")
        self.read(device, state)
        self.refuse_while_sent(device, state)
        self.update_optimizer(device, update, node)
        if update.clip != ((TOTALS,) in node.reads):
            self.refuse(device, "clipping is not as in the DAG")
        if update.clip and not any(
            isinstance(device.plan.instructions[k], Total) for k in device.order.joined
        ):
            self.refuse(device, "it is clipped before the norm is known")
        device.holds[state] = {node.writes[0]}
        device.made[state] = device.at

    def update_optimizer(self, device: DeviceBuffers, update: Update, node: UpdateNode) -> None:
        """Optimizer state that is copied has arrived, and is changed in place."""
        if bool(update.optimizer) != (len(node.writes) > 1):
            self.refuse(device, f"it {'reads' if update.optimizer else 'misses'} optimizer state")
        if update.optimizer:
            self.compare(device, [update.optimizer], node.reads[-1:])
            self.refuse_while_sent(device, update.optimizer)
            device.holds[update.optimizer] = {node.writes[1]}
            device.made[update.optimizer] = device.at

    def free(self, device: DeviceBuffers, free: Free) -> None:
        for buffer in free.values:
            if buffer not in device.holds or buffer in device.states:
                end = last_end(device.plan, buffer, device.at)
                self.refuse(device, f"{buffer} is freed but it is empty", end)
            self.refuse_while_sent(device, buffer)
            self.read(device, buffer)
            del device.holds[buffer]

    def deadlock(self, stuck: Sequence[DeviceBuffers]) -> Problem:
        plans = {device: one.plan for device, one in self.devices.items()}
        at = {device: one.at for device, one in self.devices.items()}
        awaited = {one.plan.device: self.awaited(one) for one in stuck}
        return explained(self.dag, plans, at, awaited, self.here.devices)

    def awaited(self, device: DeviceBuffers) -> int:
        """The message that a blocked device waits for."""
        event = self.pending(device, device.plan.instructions[device.at])
        assert event is not None
        return event[1]
