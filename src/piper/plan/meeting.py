"""Where instructions of several devices meet, and what every instruction says of itself."""

from __future__ import annotations

from typing import NamedTuple

from piper.names import Device


class Channel(NamedTuple):
    """Sends meet receives here, in order."""

    stream: str
    source: Device
    target: Device

    @property
    def members(self) -> tuple[Device, ...]:
        return self.source, self.target


class Group(NamedTuple):
    """Devices meet here for collectives, in order."""

    stream: str
    devices: tuple[Device, ...]

    @property
    def members(self) -> tuple[Device, ...]:
        return self.devices


Meeting = Channel | Group
Buffers = tuple[str, ...]


class Base:
    """What most instructions do: nothing of all this."""

    __slots__ = ()

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
