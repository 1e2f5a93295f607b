"""Communicators: the ordered queues on which messages of several devices are matched."""

from __future__ import annotations

from typing import NamedTuple

from piper.names import Device


class Channel(NamedTuple):
    """Point to point: sends match receives, in order."""

    stream: str
    source: Device
    target: Device

    @property
    def members(self) -> tuple[Device, ...]:
        return self.source, self.target


class Group(NamedTuple):
    """A process group: its devices issue the same collectives in the same order."""

    stream: str
    devices: tuple[Device, ...]

    @property
    def members(self) -> tuple[Device, ...]:
        return self.devices


Communicator = Channel | Group
