"""Instructions that start a copy to the memory of the host, or back from it."""

from __future__ import annotations

from dataclasses import dataclass

from piper.plan.instructions.base import Making, Waits
from piper.plan.instructions.sizes import Shape, shape_bytes


@dataclass(frozen=True, slots=True)
class Copying(Making):
    """What makes `into` of `value` in other memory. Both then exist."""

    node: str
    value: str
    into: str
    shapes: tuple[Shape, ...]
    stream: str
    bucket: str = ""  # whose optimizer state it is; empty: a value of the step
    waits: Waits = ()

    @property
    def text(self) -> str:
        return f"{self.verb:7} {self.flow} on {self.stream}"

    @property
    def moves(self) -> object:
        return self.shapes

    @property
    def copied(self) -> int:
        """Bytes that go between host and device."""
        return sum(map(shape_bytes, self.shapes))


@dataclass(frozen=True, slots=True)
class Store(Copying):
    """Start to copy a value to the host. The value must live until the copy has completed."""

    @property
    def task(self) -> str:
        return f"storing {self.value} in host memory"


@dataclass(frozen=True, slots=True)
class Fetch(Copying):
    """Start to copy a value from the host to new memory of the device."""

    @property
    def task(self) -> str:
        return f"fetching {self.into} from host memory"
