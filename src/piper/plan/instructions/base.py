"""The interface of all instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, Self

from piper.ir.naming import short_list
from piper.names import Device
from piper.plan.instructions.communicator import Communicator, Group

Waits = tuple[int, ...]
Buffers = tuple[str, ...]


class Seat(Protocol):
    """What differs between the devices of one role."""

    def peer(self, device: Device) -> Device: ...

    def group(self) -> tuple[Device, ...]:
        """The group of the next collective."""
        ...

    def counted(self) -> Buffers:
        """The gradients that the device counts in the norm."""
        ...


class Base:
    """Defaults for all properties."""

    __slots__ = ()
    node: str  # of the DAG, or nothing

    @property
    def kind(self) -> str:
        """Its kind, as in legends of pictures."""
        return type(self).__name__.lower()

    @property
    def verb(self) -> str:
        """What it does, as the printed plan says it."""
        return type(self).__name__.lower()

    @property
    def text(self) -> str:
        """How it prints, without its waits."""
        return f"{self.verb:7} {self.flow}"

    @property
    def flow(self) -> str:
        return f"{', '.join(self.uses)} -> {', '.join(self.defines)}"

    def bound(self, seat: Seat) -> Self:
        """The same instruction on another device of the role."""
        return self

    @property
    def uses(self) -> Buffers:
        """The buffers that it reads."""
        return ()

    @property
    def defines(self) -> Buffers:
        """The buffers that it writes, or starts to write."""
        return ()

    @property
    def ends(self) -> Buffers:
        """The buffers that must not be read after it."""
        return ()

    def communicator(self, device: Device) -> Communicator | None:
        """Where it is matched with other devices, if `device` runs it. None for local work."""
        return None

    @property
    def task(self) -> str:
        """What it does, for error messages. Empty: its printed line is used instead."""
        return ""

    @property
    def moves(self) -> object:
        """What the cost of a message depends on besides its communicator."""
        return ()

    @property
    def sent(self) -> int:
        """Bytes that leave the device. Tokens are assumed to be spread evenly over experts."""
        return 0

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can contain it."""
        return False

    @property
    def fixed(self) -> bool:
        """Whether its results have the same address in every step."""
        return False

    @property
    def has_dynamic_results(self) -> bool:
        """Whether the size of its results depends on data."""
        return False


class Recordable(Base):
    """What can be a part of a recorded segment."""

    __slots__ = ()

    @property
    def recordable(self) -> bool:
        return True


class Making(Base):
    """What makes `into` of `value`."""

    __slots__ = ()
    value: str
    into: str

    @property
    def uses(self) -> Buffers:
        return (self.value,)

    @property
    def defines(self) -> Buffers:
        return (self.into,)


class Moving(Making):
    """What makes `into` of `value`, which ends."""

    __slots__ = ()

    @property
    def text(self) -> str:
        return f"{self.verb:7} {self.into} += {self.value}"

    @property
    def ends(self) -> Buffers:
        return (self.value,)


class Several(Base):
    """What reads and writes lists of buffers."""

    __slots__ = ()
    reads: Buffers
    writes: Buffers

    @property
    def uses(self) -> Buffers:
        return self.reads

    @property
    def defines(self) -> Buffers:
        return self.writes


class Among(Base):
    """What all devices of a group do together."""

    __slots__ = ()
    group: tuple[Device, ...]
    stream: str

    @property
    def text(self) -> str:
        return f"{self.verb:7} {self.flow} {self.among}"

    @property
    def among(self) -> str:
        return f"among {short_list(self.group, ', ')} on {self.stream}"

    def bound(self, seat: Seat) -> Self:
        return replace(self, group=seat.group())  # type: ignore[type-var]

    @property
    def task(self) -> str:
        return f"the {self.node}"

    def communicator(self, device: Device) -> Group:
        return Group(self.stream, self.group)
