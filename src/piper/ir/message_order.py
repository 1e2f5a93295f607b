"""An order that names what passes have yet to make: messages and updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper.ir.filters import Both, Either, Filter, Not, both, either
from piper.ir.maker import Maker
from piper.names import OF, PASS, NodeId, Operation

OPERATIONS = frozenset(map(str, Operation))


@dataclass(frozen=True, slots=True)
class OrderSlot:
    """One slot: passes of regions, and filters for all else."""

    nodes: tuple[NodeId, ...] = ()
    filters: tuple[Filter, ...] = ()
    later: tuple[NodeId, ...] = ()  # passes of the next step
    arrivals: tuple[NodeId, ...] = ()  # control messages, sent after the slot before; by a pass

    def __str__(self) -> str:
        """
        >>> print(OrderSlot((NodeId("PP0:F"),), (Filter(((PASS, "REDUCE"),)),)))
        PP0:F; where(PASS='REDUCE')
        """
        names = [", ".join(self.nodes), ", ".join(map(str, self.filters))]
        if self.later or self.arrivals:
            names += [", ".join(self.later), ", ".join(self.arrivals)]
        return "; ".join(names)


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """The slots of an `Order`, kept until the nodes exist that its filters name."""

    slots: tuple[OrderSlot, ...]
    maker: Maker


def names_operations(wanted: Filter) -> bool:
    """Whether a filter means messages or updates, and not passes of regions."""
    if type(wanted) is Filter:  # nearly all are, and there may be 100,000 of them
        return is_operation(dict(wanted.items).get(PASS))
    return any(map(is_operation, named_passes(wanted)))


def is_operation(value: object) -> bool:
    return any(map(is_operation, value)) if type(value) is tuple else value in OPERATIONS


def named_passes(wanted: Filter) -> Iterator[object]:
    """The values of PASS in all parts of a filter."""
    match wanted:
        case Either() | Both():
            for part in wanted.parts:
                yield from named_passes(part)
        case Not():
            yield from named_passes(wanted.part)
        case Filter():
            for value in (value for key, value in wanted.items if key == PASS):
                yield from value if isinstance(value, tuple) else (value,)


def without_operations(wanted: Filter) -> Filter:
    """The filter for the regions that messages or updates belong to."""
    match wanted:
        case Either():
            return either(*map(without_operations, wanted.parts))
        case Both():
            return both(*map(without_operations, wanted.parts))
        case Not():
            return ~without_operations(wanted.part)
        case Filter():
            return Filter(tuple(item for item in wanted.items if item[0] not in (PASS, OF)))
