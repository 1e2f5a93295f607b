"""What every instruction says of itself, so that whoever walks a plan asks it."""

from __future__ import annotations

from piper.names import Device
from piper.plan.meeting import Group, Meeting

Waits = tuple[int, ...]
Buffers = tuple[str, ...]


class Base:
    """What most instructions do: nothing of all this."""

    __slots__ = ()
    node: str  # of the DAG, or nothing

    @property
    def kind(self) -> str:
        """What it does, in one word of the legend."""
        return type(self).__name__.lower()

    @property
    def uses(self) -> Buffers:
        """What it reads."""
        return ()

    @property
    def defines(self) -> Buffers:
        """What it writes, or starts to."""
        return ()

    @property
    def ends(self) -> Buffers:
        """What nobody may read after it."""
        return ()

    def meeting(self, device: Device) -> Meeting | None:
        """Where it meets instructions of other devices, if this device runs it."""
        return None

    @property
    def task(self) -> str:
        """What it does, in the words of an error; empty: there is nothing better than its line."""
        return ""

    @property
    def moves(self) -> object:
        """Of a message, all that its cost depends on besides where it goes."""
        return ()

    @property
    def sent(self) -> int:
        """Bytes that leave the device; rows of experts count as if they were spread evenly."""
        return 0

    @property
    def recordable(self) -> bool:
        """Whether it can be a part of a recorded segment."""
        return False

    @property
    def fixed(self) -> bool:
        """Whether what it defines is in the same memory in every step."""
        return False

    @property
    def loosens(self) -> bool:
        """Whether what it defines has a number of rows that is not known beforehand."""
        return False


class Recordable(Base):
    """What can be a part of a recorded segment."""

    __slots__ = ()

    @property
    def recordable(self) -> bool:
        return True


class Moving(Base):
    """What makes `into` of `value`, which ends."""

    __slots__ = ()
    value: str
    into: str

    @property
    def uses(self) -> Buffers:
        return (self.value,)

    @property
    def defines(self) -> Buffers:
        return (self.into,)

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
    def task(self) -> str:
        return f"the {self.node}"

    def meeting(self, device: Device) -> Group:
        return Group(self.stream, self.group)
