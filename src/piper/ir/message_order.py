"""An order that names what passes have yet to make: messages and updates."""

from __future__ import annotations

from dataclasses import dataclass

from piper.errors import Problem, Refused
from piper.ir.filters import Both, Either, Filter, Not
from piper.ir.maker import Maker
from piper.names import PASS, NodeId, Operation

OPERATIONS = frozenset(map(str, Operation))


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
    if type(wanted) is Filter:
        for key, value in wanted.items:
            if key == PASS and value in OPERATIONS:
                return True
            if key == PASS and type(value) is tuple and not OPERATIONS.isdisjoint(value):
                raise Refused(one_each(wanted))
        return False
    if any(map(names_operations, parts_of(wanted))):
        raise Refused(one_each(wanted))
    return False


def parts_of(wanted: Filter) -> tuple[Filter, ...]:
    match wanted:
        case Either() | Both():
            return wanted.parts
        case Not():
            return (wanted.part,)
        case Filter():
            return ()


def one_each(wanted: Filter) -> Problem:
    what = f"{wanted} names messages or updates as one of several"
    return Problem(what, 'write a filter for each in one slot: where(PASS="SEND"), where(PASS="F")')
