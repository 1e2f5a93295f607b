"""The instruction set. A plan is data: it prints, and is the same for the same input.

The host issues a plan's instructions in order. `Send` and `Recv` then go on by themselves, in order
on their channel (stream, sender, receiver), `Reduce`, `Gather` and `Exchange` on theirs (stream,
group); all else runs in order on the compute stream. `waits` are the positions of earlier
instructions of the same plan, on other streams, that must have ended.

An instruction says itself what it uses, defines and ends, and whom it meets: whoever walks a plan
asks it. A new instruction is a class here, its lowering, and its execution and price.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from piper.names import COMPUTE, TOTALS_STREAM, Device, Share
from piper.plan.meeting import Base, Buffers, Channel, Group

Waits = tuple[int, ...]
Layout = tuple[str, tuple[int, ...], int]  # of a flat message: type, tensors, padded elements
Shape = tuple[tuple[int | None, ...], str]  # sizes (None: not known before it is there) and type


@dataclass(frozen=True, slots=True)
class Load(Base):
    """Take a microbatch's part of an input, its loss weight, or its random counter."""

    value: str
    role: str  # batch, seed or random
    index: int
    part: int
    parts: int

    stream = COMPUTE
    node = ""
    waits: Waits = ()

    @property
    def defines(self) -> Buffers:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Run(Base):
    """Run one phase of a region."""

    node: str
    region: str
    phase: str
    reads: Buffers
    writes: Buffers
    waits: Waits = ()

    stream = COMPUTE

    @property
    def kind(self) -> str:
        return self.phase

    @property
    def uses(self) -> Buffers:
        return self.reads

    @property
    def defines(self) -> Buffers:
        return self.writes


@dataclass(frozen=True, slots=True)
class Keep(Base):
    """The first part of a sum: from now on `into` is what `value` was."""

    into: str
    value: str
    waits: Waits = ()

    stream = COMPUTE
    node = ""

    @property
    def uses(self) -> Buffers:
        return (self.value,)

    @property
    def defines(self) -> Buffers:
        return (self.into,)

    @property
    def ends(self) -> Buffers:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Add(Base):
    """Another part of a sum, added in place; `value` ends."""

    into: str
    value: str
    waits: Waits = ()

    stream = COMPUTE
    node = ""

    @property
    def uses(self) -> Buffers:
        return (self.into, self.value)

    @property
    def defines(self) -> Buffers:
        return (self.into,)

    @property
    def ends(self) -> Buffers:
        return (self.value,)


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


@dataclass(frozen=True, slots=True)
class Reduce(Base):
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
    def uses(self) -> Buffers:
        return (self.value,)

    @property
    def defines(self) -> Buffers:
        return (self.into,)

    @property
    def ends(self) -> Buffers:
        return (self.value,)

    def meeting(self, device: Device) -> Group:
        return Group(self.stream, self.group)


@dataclass(frozen=True, slots=True)
class Gather(Base):
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
    def uses(self) -> Buffers:
        return (self.value,)

    @property
    def defines(self) -> Buffers:
        return (self.into,)

    def meeting(self, device: Device) -> Group:
        return Group(self.stream, self.group)


@dataclass(frozen=True, slots=True)
class Exchange(Base):
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
    def uses(self) -> Buffers:
        return self.reads

    @property
    def defines(self) -> Buffers:
        return self.writes

    def meeting(self, device: Device) -> Group:
        return Group(self.stream, self.group)


@dataclass(frozen=True, slots=True)
class Total(Base):
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

    def meeting(self, device: Device) -> Group:
        return Group(self.stream, self.group)


@dataclass(frozen=True, slots=True)
class Update(Base):
    """The optimizer's step on one bucket; clipped if it waits for the total."""

    node: str
    bucket: str
    grad: str
    clip: bool = False
    waits: Waits = ()

    stream = COMPUTE

    @property
    def uses(self) -> Buffers:
        return (self.grad,)


@dataclass(frozen=True, slots=True)
class Free(Base):
    """These values end."""

    values: Buffers
    waits: Waits = ()

    stream = COMPUTE
    node = ""

    @property
    def ends(self) -> Buffers:
        return self.values


Instruction = (
    Load | Run | Keep | Add | Send | Recv | Reduce | Gather | Exchange | Total | Update | Free
)


def is_dynamic(shape: Shape) -> bool:
    """Whether a size depends on data.

    >>> is_dynamic(((None, 4), "float32"))
    True
    """
    return None in shape[0]


def is_message(instruction: Instruction) -> bool:
    """Whether it goes on by itself, and is waited for."""
    return instruction.stream != COMPUTE


@dataclass(frozen=True, slots=True)
class State:
    """Memory that outlives the step: a bucket's parameters, at home or as a copy.

    With `ways` above 1 it is shard `shard` of that many, cut as `messages` say. With `shares`
    above 1 it has share `share` of the experts only (of which it may be a shard).
    """

    value: str
    bucket: str
    home: bool
    shard: int = 0
    ways: int = 1
    messages: tuple[Layout, ...] = ()
    share: int = 0
    shares: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What one device does in a step."""

    device: Device
    states: tuple[State, ...]
    instructions: tuple[Instruction, ...]
    buffers: tuple[int, ...] = ()  # bytes of each buffer that gathers fill
    streams: tuple[Share, ...] = ()  # what they get of a GPU; the same in all plans of a job

    def __str__(self) -> str:
        head = ", ".join([f"device {self.device}", *map(str, self.streams)])
        return "\n".join([head, *map(line, self.instructions)])


def among(collective: Reduce | Gather | Exchange) -> str:
    devices = ", ".join(map(str, collective.group))
    return f"among {devices} on {collective.stream}"


def line(instruction: Instruction) -> str:
    """One instruction on one line.

    >>> line(Send("send h0>1", "h0", (((2, 4), "float32"),), 1, "pp"))
    'send    h0 to 1 on pp'
    """
    after = f"  after {', '.join(map(str, instruction.waits))}" if instruction.waits else ""
    reads, writes = ", ".join(instruction.uses), ", ".join(instruction.defines)
    match instruction:
        case Load():
            text = f"load    {writes}"
        case Run():
            text = f"run     {instruction.node} ({reads}) -> {writes}"
        case Keep() | Add():
            text = f"{instruction.kind:7} {instruction.into} += {instruction.value}"
        case Send():
            text = f"send    {instruction.value} to {instruction.peer} on {instruction.stream}"
        case Recv():
            text = f"recv    {instruction.value} from {instruction.peer} on {instruction.stream}"
        case Reduce():
            what = "scatter" if instruction.scatter else "reduce"
            text = f"{what:7} {reads} -> {writes} {among(instruction)}"
        case Gather():
            text = f"gather  {reads} -> {writes} [{instruction.buffer}] {among(instruction)}"
        case Exchange():
            text = f"{instruction.way:7} {reads} -> {writes} {among(instruction)}"
        case Total():
            text = f"total   {reads}"
        case Update():
            text = f"update  {instruction.bucket} by {instruction.grad}"
        case Free():
            text = f"free    {', '.join(instruction.values)}"
        case _:
            assert_never(instruction)
    return text + after
