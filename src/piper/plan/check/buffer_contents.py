"""What the buffers of all devices hold during symbolic execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from piper.errors import BUG, PlanError
from piper.ir.by_device.local_dags import View, views
from piper.ir.by_device.roles import Present
from piper.ir.dag import Dag
from piper.ir.naming import optimizer_state, replica_buffer
from piper.ir.nodes import Compute, Exchange, Fetch, Precedence, Redistribute, Store
from piper.ir.values import LOADED
from piper.names import COMPUTE, BucketId, amount
from piper.plan.check.excerpts import excerpts, last_end
from piper.plan.check.interpreter import Interpreter, Progress
from piper.plan.check.stream_order import StreamOrder
from piper.plan.inputs import input_buffers
from piper.plan.instructions import Instruction
from piper.plan.rendezvous import Event


class Wanted:
    """A DAG that devices must compute, and the inputs that they load for it."""

    def __init__(self, view: View) -> None:
        self.dag, self.replicas, self.devices = view.dag, view.replicas, view.devices
        self.inputs = input_buffers(view.dag, view.replicas)
        self.orders: dict[str, list[tuple[int, Precedence]]] = {}  # of messages, numbered
        for number, order in enumerate(view.dag.precedences):
            for name in order.after if order.partial else ():
                self.orders.setdefault(name, []).append((number, order))


@dataclass
class DeviceBuffers(Progress):
    """One device: its position in its plan, and what its buffers hold."""

    holds: dict[str, set[str]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # buffer -> the instruction that wrote it
    used: dict[str, list[int]] = field(default_factory=dict)  # buffer -> the messages that read it
    rewritten: set[str] = field(default_factory=set)  # buffers that other streams overwrite
    read_at: dict[str, int] = field(default_factory=dict)  # of those: the last run that read it
    ran: dict[str, int] = field(default_factory=dict)  # node -> instruction
    filled: dict[int, str] = field(default_factory=dict)  # gather buffer -> the value in it
    stream: str = COMPUTE  # which reads the operands of the instruction at hand

    def __post_init__(self) -> None:
        self.order = StreamOrder(self.plan)
        self.states: set[str] = {state.value for state in self.plan.states}
        moved = (state for state in self.plan.states if state.host)
        self.states.update(optimizer_state(BucketId(state.bucket)) for state in moved)
        self.holds.update((state, {state}) for state in self.states)
        self.rewritten |= self.states
        self.wanted: Wanted  # what it must compute


@dataclass(kw_only=True)
class BufferChecks(Interpreter[DeviceBuffers]):
    """Reads and writes of buffers, compared with the DAG that the plans must compute."""

    dag: Dag
    here: Present  # the devices that must have a plan

    def __post_init__(self) -> None:
        every = dict.fromkeys((*self.devices, *sorted(self.here.devices)))
        self.wanted = tuple(Wanted(view) for view in views(self.dag, tuple(every)))
        for one in self.wanted:
            for device in one.devices:
                if device in self.devices:
                    self.devices[device].wanted = one

    def required(self) -> Iterator[tuple[Dag, Present]]:
        """What must be computed, and the devices that must compute it."""
        if len(self.wanted) == 1:
            yield self.wanted[0].dag, self.here
            return
        for one in self.wanted:
            yield one.dag, Present(set(one.devices) & self.here.devices)

    def pending(self, device: DeviceBuffers, one: Instruction) -> Event | None:
        if not one.waits:  # most instructions
            return None
        for position in one.waits:
            if position >= device.at:
                what = f"it waits for instruction {position}, which comes later"
                self.refuse(device, what, position)
        return super().pending(device, one)

    def expected(
        self, device: DeviceBuffers, node: Compute | Exchange | Redistribute | Store | Fetch
    ) -> Sequence[Sequence[str]]:
        """What a node reads. Where replicas share a device, each reads the inputs of its own."""
        assert node.devices is not None
        wanted = device.wanted
        replica, of = wanted.replicas.place(node.devices, device.plan.device)
        if of == 1 or not replica:
            return node.reads
        known = wanted.dag.values
        return [
            [replica_buffer(v, replica) if known[v].role in LOADED else v for v in total]
            for total in node.reads
        ]

    def refuse(self, device: DeviceBuffers, what: str, *others: int | Event | None) -> NoReturn:
        """Raise a PlanError that shows the plan here and at `others`.

        An int in `others` is an instruction of this device, an event one of any device.
        """
        number = device.plan.device
        events = [(number, k) if isinstance(k, int) else k for k in others if k is not None]
        picture = self.picture(device.here, *events)
        raise PlanError.of(f"device {number}", f"{what}\n{picture}", BUG)

    def picture(self, here: Event, *others: Event) -> str:
        """The plans around these instructions."""
        plans = {device: self.devices[device].plan for device, _ in (here, *others)}
        return excerpts(plans, here, *others)

    def write(self, device: DeviceBuffers, buffer: str, content: set[str]) -> None:
        if buffer in device.holds:
            made = device.made.get(buffer)
            self.refuse(device, f"{buffer} is written while it is still in use", made)
        device.holds[buffer] = content
        device.made[buffer] = device.at

    def read(self, device: DeviceBuffers, buffer: str) -> set[str]:
        """What a buffer holds. It must not be empty, and its write must be ordered before this."""
        content = device.holds.get(buffer)
        if content is None:
            end = last_end(device.plan, buffer, device.at)
            self.refuse(device, f"{buffer} is read but it is empty", end)
        made = device.made.get(buffer)
        if made is not None and not device.order.is_after(device.stream, made):
            self.refuse(device, f"{buffer} is read before it is written", made)
        return content

    def take(self, device: DeviceBuffers, buffer: str) -> set[str]:
        content = self.read(device, buffer)
        self.refuse_while_sent(device, buffer)
        del device.holds[buffer]
        return content

    def once(self, device: DeviceBuffers, node: str) -> None:
        if node in device.ran:
            self.refuse(device, f"{node} runs twice", device.ran[node])
        device.ran[node] = device.at

    def compare(
        self, device: DeviceBuffers, buffers: Sequence[str], wanted: Sequence[Sequence[str]]
    ) -> None:
        if len(buffers) != len(wanted):
            self.refuse(
                device, f"it reads {amount(len(buffers), 'value')} instead of {len(wanted)}"
            )
        for buffer, parts in zip(buffers, map(set, wanted), strict=True):
            found = self.read(device, buffer)
            if found != parts:
                what = f"{buffer} {difference(found, parts)}"
                self.refuse(device, what, *self.makers(device, found ^ parts))

    def makers(self, device: DeviceBuffers, values: set[str]) -> list[int]:
        """Where this device made the values that are missing or extra, at most two positions."""
        producers = device.wanted.dag.producers
        ran = (device.ran.get(producers.get(v, "")) for v in sorted(values))  # type: ignore[call-overload]
        return [position for position in ran if position is not None][:2]

    def refuse_while_sent(self, device: DeviceBuffers, buffer: str) -> None:
        """A buffer that is being sent or read must not be overwritten or freed."""
        stream = device.stream
        for send in device.used.get(buffer, ()):
            if not device.order.is_after(stream, send):
                self.refuse(
                    device, f"{buffer} is overwritten or freed while it is being sent", send
                )
        read = device.read_at.get(buffer)
        if read is not None and not device.order.is_after(stream, read):
            self.refuse(device, f"{buffer} is overwritten while it is in use", read)


def difference(found: set[str], wanted: set[str]) -> str:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    parts = [f"is missing {missing[0]}"] if missing else []
    parts += [f"holds {extra[0]}, which does not belong there"] if extra else []
    return " and ".join(parts)
