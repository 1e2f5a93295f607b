"""An order that names what passes have yet to make: messages and updates."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.filters import Filter
from piper.ir.maker import Maker
from piper.names import PASS, NodeId, Operation


@dataclass(frozen=True, slots=True)
class OrderSlot:
    """One slot: passes of regions, and filters for all else."""

    nodes: tuple[NodeId, ...] = ()
    filters: tuple[Filter, ...] = ()

    def __str__(self) -> str:
        """
        >>> print(OrderSlot((NodeId("PP0:F"),), (Filter(((PASS, "REDUCE"),)),)))
        PP0:F; where(PASS='REDUCE')
        """
        return f"{', '.join(self.nodes)}; {', '.join(map(str, self.filters))}"


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """The slots of an `Order`, kept until the nodes exist that its filters name."""

    slots: tuple[OrderSlot, ...]
    maker: Maker


def names_operations(wanted: Filter) -> bool:
    """Whether a filter means messages or updates, and not passes of regions."""
    return any(key == PASS and value in tuple(Operation) for key, value in wanted.items)
