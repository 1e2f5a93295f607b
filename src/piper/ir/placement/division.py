"""What `Shard` of weights or tokens asks of capture: which regions to divide, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from piper.ir.placement.placements import Placement
from piper.names import RegionId

What = Literal["weights", "tokens", "experts"]
Attention = Literal["ring", "zigzag"]


@dataclass(frozen=True, slots=True)
class TeamAxis:
    """Where devices are in a team that divides regions by tokens and by weights."""

    number: int = 0  # 0: tokens, 1: weights
    team: int | None = None  # devices of a team; None: there is only one axis
    stride: int = 1  # from one device to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionRequest:
    """Regions of the undivided model that `ways` devices compute together.

    Of regions of experts, each device takes a part of the rows. `Shard` moves these to the devices
    of their experts.
    """

    regions: tuple[RegionId, ...]
    ways: int
    what: What
    axis: TeamAxis = TeamAxis()
    seeds: Mapping[str, Placement] = field(default_factory=dict)  # parameters fixed by name
    held: Mapping[str, Placement] = field(default_factory=dict, repr=False)  # where they are so far
    attention: Attention | None = None  # of tokens; None: whatever the search finds

    @property
    def is_zigzag(self) -> bool:
        return self.attention == "zigzag"
