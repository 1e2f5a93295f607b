"""Where instructions of several devices meet."""

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
