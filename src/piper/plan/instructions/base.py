"""The interface of all instructions."""

from __future__ import annotations

from piper.names import Device
from piper.plan.communicator import Communicator

Waits = tuple[int, ...]
Buffers = tuple[str, ...]


class Base:
    """Defaults for all properties."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """Its kind, as in legends of pictures."""
        return type(self).__name__.lower()

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
