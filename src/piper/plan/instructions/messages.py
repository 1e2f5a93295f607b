"""Instructions that start a message. It is asynchronous until an instruction waits for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from piper.names import TOTALS_STREAM, Device
from piper.plan.instructions.base import Among, Base, Buffers, Making, Moving, Seat, Several, Waits
from piper.plan.instructions.communicator import Channel
from piper.plan.instructions.sizes import Layout, Shape, is_dynamic, ring_bytes, shape_bytes


@dataclass(frozen=True, slots=True)
class Send(Base):
    """Start to send. The value must live until the send has completed."""

    node: str
    value: str
    shapes: tuple[Shape, ...]
    peer: Device
    stream: str
    waits: Waits = ()

    @property
    def uses(self) -> Buffers:
        return (self.value,)

    def communicator(self, device: Device) -> Channel:
        return Channel(self.stream, device, self.peer)

    @property
    def task(self) -> str:
        return f"sending {self.value} to device {self.peer}"

    @property
    def text(self) -> str:
        return f"send    {self.value} to {self.peer} on {self.stream}"

    def bound(self, seat: Seat) -> Self:
        return replace(self, peer=seat.peer(self.peer))

    @property
    def moves(self) -> object:
        return self.shapes

    @property
    def sent(self) -> int:
        return sum(map(shape_bytes, self.shapes))


@dataclass(frozen=True, slots=True)
class Recv(Base):
    """Start to receive. A state is received in place, anything else into new memory."""

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

    def communicator(self, device: Device) -> Channel:
        return Channel(self.stream, self.peer, device)

    @property
    def task(self) -> str:
        return f"receiving {self.value} from device {self.peer}"

    @property
    def text(self) -> str:
        return f"recv    {self.value} from {self.peer} on {self.stream}"

    def bound(self, seat: Seat) -> Self:
        return replace(self, peer=seat.peer(self.peer))

    @property
    def fixed(self) -> bool:
        return not any(map(is_dynamic, self.shapes))


@dataclass(frozen=True, slots=True)
class Reduce(Among, Moving):
    """Start an all-reduce or reduce-scatter of a bundle. `value` ends; `into` is the result."""

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
    def verb(self) -> str:
        return "scatter" if self.scatter else "reduce"

    @property
    def moves(self) -> object:
        return (self.messages, self.scatter)

    @property
    def sent(self) -> int:
        return (1 if self.scatter else 2) * ring_bytes(self.messages, self.group)


@dataclass(frozen=True, slots=True)
class Gather(Among, Making):
    """Start an all-gather of the shards of a group into a gather buffer of the plan."""

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
    def moves(self) -> object:
        return self.messages

    @property
    def text(self) -> str:
        return f"gather  {self.flow} [{self.buffer}] {self.among}"

    @property
    def sent(self) -> int:
        return ring_bytes(self.messages, self.group)


@dataclass(frozen=True, slots=True)
class Exchange(Among, Several):
    """Start a token all-to-all: dispatch tokens to the devices of their experts, or combine them.

    Reads tokens, then the number of tokens per expert, or the route that a counted dispatch made.
    Writes tokens. A counted dispatch also writes the tokens per local expert, and the route.
    """

    node: str
    way: str  # counted or out (dispatch), or back (combine)
    reads: Buffers
    writes: Buffers
    shapes: tuple[Shape, ...]  # of the tokens, if they are spread evenly
    group: tuple[Device, ...]
    stream: str
    waits: Waits = ()

    @property
    def task(self) -> str:
        return f"the token all-to-all {self.node}"

    @property
    def verb(self) -> str:
        return self.way

    @property
    def has_dynamic_results(self) -> bool:
        return self.way != "back"

    @property
    def moves(self) -> object:
        return (self.shapes, self.way)

    @property
    def sent(self) -> int:
        size = sum(map(shape_bytes, self.shapes))
        return size * (len(self.group) - 1) // len(self.group)


SHIFTS = ("shift", "shift-back")


@dataclass(frozen=True, slots=True)
class Redistribute(Among, Making):
    """Start a collective on one tensor, which devices that divide a region need elsewhere.

    All work along the first dimension: an all-gather joins the tensors of a group, a reduce-scatter
    adds them up and takes a slice, an all-to-all sends a slice to each. A shift sends all of it to
    the next device of the group, and that of the last one to the first. `value` stays as it is.
    """

    node: str
    step: str
    value: str
    into: str
    shape: Shape  # of `value`
    group: tuple[Device, ...]
    stream: str
    waits: Waits = ()

    @property
    def kind(self) -> str:
        return self.step

    @property
    def verb(self) -> str:
        return self.step

    @property
    def moves(self) -> object:
        return (self.shape, self.step)

    @property
    def sent(self) -> int:
        ways, size = len(self.group), shape_bytes(self.shape)
        if self.step in SHIFTS:
            return size
        rounds = {"all-gather": ways, "all-reduce": 2}.get(self.step, 1)
        return rounds * size * (ways - 1) // ways


@dataclass(frozen=True, slots=True)
class Total(Among):
    """The loss and norm all-reduce: sums of weighted losses and squared gradients."""

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
        return "the loss and norm all-reduce"

    @property
    def text(self) -> str:
        return f"total   {', '.join(self.uses)}"

    def bound(self, seat: Seat) -> Self:
        return replace(self, grads=seat.counted())
