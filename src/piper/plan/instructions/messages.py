"""Instructions that start a message, which then goes on by itself until it is waited for."""

from __future__ import annotations

from dataclasses import dataclass

from piper.names import TOTALS_STREAM, Device
from piper.plan.instructions.base import Among, Base, Buffers, Moving, Several, Waits
from piper.plan.instructions.sizes import Layout, Shape, is_dynamic, ring_bytes, shape_bytes
from piper.plan.meeting import Channel


@dataclass(frozen=True, slots=True)
class Send(Base):
    """Start to send; the value may end only when this has."""

    node: str
    value: str
    shapes: tuple[Shape, ...]
    peer: Device
    stream: str
    waits: Waits = ()

    @property
    def uses(self) -> Buffers:
        return (self.value,)

    def meeting(self, device: Device) -> Channel:
        return Channel(self.stream, device, self.peer)

    @property
    def task(self) -> str:
        return f"sending {self.value} to device {self.peer}"

    @property
    def moves(self) -> object:
        return self.shapes

    @property
    def sent(self) -> int:
        return sum(map(shape_bytes, self.shapes))


@dataclass(frozen=True, slots=True)
class Recv(Base):
    """Start to receive. A state is received in place, anything else in memory of its own."""

    node: str
    value: str
    shapes: tuple[Shape, ...]
    peer: Device
    stream: str
    bundle: bool = False  # a tuple of tensors, even if there is only one
    waits: Waits = ()

    @property
    def defines(self) -> Buffers:
        return (self.value,)

    def meeting(self, device: Device) -> Channel:
        return Channel(self.stream, self.peer, device)

    @property
    def task(self) -> str:
        return f"receiving {self.value} from device {self.peer}"

    @property
    def fixed(self) -> bool:
        return not any(map(is_dynamic, self.shapes))


@dataclass(frozen=True, slots=True)
class Reduce(Among, Moving):
    """Start to add up a bundle over the group; `value` ends, `into` is the sum or a shard of it."""

    node: str
    value: str
    into: str
    messages: tuple[Layout, ...]
    group: tuple[Device, ...]
    scatter: bool
    stream: str
    waits: Waits = ()

    @property
    def kind(self) -> str:
        return "reduce-scatter" if self.scatter else "all-reduce"

    @property
    def moves(self) -> object:
        return (self.messages, self.scatter)

    @property
    def sent(self) -> int:
        return (1 if self.scatter else 2) * ring_bytes(self.messages, self.group)


@dataclass(frozen=True, slots=True)
class Gather(Among):
    """Start to put the shards of the group together, in a buffer of the plan."""

    node: str
    value: str
    into: str
    messages: tuple[Layout, ...]
    shapes: tuple[Shape, ...]
    group: tuple[Device, ...]
    buffer: int
    stream: str
    waits: Waits = ()

    @property
    def fixed(self) -> bool:
        return True

    @property
    def uses(self) -> Buffers:
        return (self.value,)

    @property
    def defines(self) -> Buffers:
        return (self.into,)

    @property
    def moves(self) -> object:
        return self.messages

    @property
    def sent(self) -> int:
        return ring_bytes(self.messages, self.group)


@dataclass(frozen=True, slots=True)
class Exchange(Among, Several):
    """Start to bring rows to the devices of their experts, or back.

    Reads rows, then how many each expert has, or the route that a counted exchange found; writes
    rows, and when counted how many each expert here has, and the route.
    """

    node: str
    way: str  # counted, out or back
    reads: Buffers
    writes: Buffers
    shapes: tuple[Shape, ...]  # of the rows, when they are spread evenly
    group: tuple[Device, ...]
    stream: str
    waits: Waits = ()

    @property
    def task(self) -> str:
        return f"the exchange {self.node}"

    @property
    def loosens(self) -> bool:
        return self.way != "back"

    @property
    def moves(self) -> object:
        return (self.shapes, self.way)

    @property
    def sent(self) -> int:
        rows = sum(map(shape_bytes, self.shapes))
        return rows * (len(self.group) - 1) // len(self.group)


@dataclass(frozen=True, slots=True)
class Total(Among):
    """Add up weighted losses and squared gradients here, then over the devices of the group."""

    node: str
    losses: tuple[tuple[str, int], ...]  # value, microbatch
    grads: Buffers
    group: tuple[Device, ...]
    waits: Waits = ()

    stream = TOTALS_STREAM

    @property
    def kind(self) -> str:
        return TOTALS_STREAM

    @property
    def uses(self) -> Buffers:
        return (*(loss for loss, _ in self.losses), *self.grads)

    @property
    def task(self) -> str:
        return "the totals (loss and gradient norm)"
