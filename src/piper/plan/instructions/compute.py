"""Instructions that run in order on the compute stream."""

from __future__ import annotations

from dataclasses import dataclass

from piper.names import COMPUTE
from piper.plan.instructions.base import Base, Buffers, Making, Moving, Recordable, Several, Waits


@dataclass(frozen=True, slots=True)
class Load(Base):
    """Take a microbatch's part of an input, its loss weight, its random counter, the rank, or what
    a control message brings."""

    value: str
    role: str  # batch, seed, random, rank or control
    index: int
    part: int
    parts: int
    sizes: tuple[int, ...] = ()  # rows of each microbatch of a replica, if they differ

    stream = COMPUTE
    node = ""
    waits: Waits = ()

    @property
    def defines(self) -> Buffers:
        return (self.value,)

    @property
    def text(self) -> str:
        return f"load    {self.value}"


@dataclass(frozen=True, slots=True)
class Run(Recordable, Several):
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
    def text(self) -> str:
        return f"run     {self.node} ({', '.join(self.reads)}) -> {', '.join(self.writes)}"


@dataclass(frozen=True, slots=True)
class Slice(Recordable, Making):
    """Take one of `parts` equal slices of the first dimension. `value` stays as it is."""

    node: str
    value: str
    into: str
    part: int
    parts: int
    waits: Waits = ()

    stream = COMPUTE

    @property
    def text(self) -> str:
        return f"slice   {self.flow}, {self.part} of {self.parts}"


@dataclass(frozen=True, slots=True)
class Keep(Recordable, Moving):
    """The first part of a sum: `into` takes over the buffer of `value`."""

    into: str
    value: str
    waits: Waits = ()

    stream = COMPUTE
    node = ""


@dataclass(frozen=True, slots=True)
class Add(Recordable, Moving):
    """Add another part of a sum in place. `value` ends."""

    into: str
    value: str
    waits: Waits = ()

    stream = COMPUTE
    node = ""

    @property
    def fixed(self) -> bool:
        return True

    @property
    def uses(self) -> Buffers:
        return (self.into, self.value)


@dataclass(frozen=True, slots=True)
class Update(Base):
    """The optimizer step on one bucket. If `clip`, gradients are clipped by the norm first."""

    node: str
    bucket: str
    grad: str
    clip: bool = False
    waits: Waits = ()
    optimizer: str = ""  # the buffer of its state, if that is copied; changed in place
    parameters: str = ""  # the buffer of its parameters, if these are copied; changed in place

    stream = COMPUTE

    @property
    def uses(self) -> Buffers:
        return (self.grad, *filter(None, (self.optimizer, self.parameters)))

    @property
    def task(self) -> str:
        return f"the update of {self.bucket}"

    @property
    def text(self) -> str:
        return f"update  {self.bucket} by {self.grad}"


@dataclass(frozen=True, slots=True)
class Free(Recordable):
    """Free these values."""

    values: Buffers
    waits: Waits = ()

    stream = COMPUTE
    node = ""

    @property
    def ends(self) -> Buffers:
        return self.values

    @property
    def task(self) -> str:
        return f"freeing {', '.join(self.values)}"

    @property
    def text(self) -> str:
        return f"free    {', '.join(self.values)}"
