"""What a user asks for: which regions are divided, over how many devices, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from piper.ir.placements import Placement

What = Literal["weights", "tokens"]
Tags = tuple[tuple[str, int], ...]


def every_region(tags: Tags) -> bool:
    return True


@dataclass(frozen=True)
class Request:
    """Divide the regions with these tags over `ways` devices.

    "weights": parameters are cut (tensor and sequence parallelism). "tokens": parameters stay whole
    (context parallelism). `seeds` fix placements of parameters; a name may be a pattern.
    """

    ways: int
    what: What = "weights"
    matches: Callable[[Tags], bool] = every_region
    seeds: Mapping[str, Placement] = field(default_factory=dict)

    def seed(self, name: str) -> Placement | None:
        return next((seed for key, seed in self.seeds.items() if fnmatchcase(name, key)), None)
