"""Order: when regions run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from piper.directives.base import chosen
from piper.errors import Problem, Refused
from piper.ir.cycles import lanes
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.maker import ORDER, Maker
from piper.ir.nodes import Compute, Node, Precedence
from piper.ir.training import split_backward
from piper.names import BI, BW, PASS, B, NodeId

Slot = tuple[Filter, ...]
Ahead = bool | Literal["pairs"]


@dataclass(frozen=True, slots=True, repr=False)
class Order:
    """Run each slot before the next, on its devices. What shares a slot may overlap.

    `PASS="BI"` and `PASS="BW"` split that backward in its two halves. What shares a slot is
    interleaved so that one's communication hides behind the other's compute; with `overlap=False`
    it runs in the order in which it is listed, to be given by hand: `where(PP=0, RUN=1, ...)` is
    the second region of these tags. With `ahead=True`, of two neighbouring slots with one filter
    each the second may begin while the first one waits for its tokens; with `ahead="pairs"`, of any
    two, and the weight gradients that Piper cuts off a backward may come as much later again.

    rewrite:
        a    b                  Order([[a], [b]]), with no path between them
        -->
        a -> b                  on each device, all of a slot before any of the next
    """

    slots: tuple[Slot, ...]
    overlap: bool = True
    ahead: Ahead = False

    def __post_init__(self) -> None:
        if isinstance(self.slots, Filter) or not isinstance(self.slots, list | tuple):
            raise Refused(
                Problem(f"{self.slots!r} is no list of slots", "write Order([[...], ...])")
            )
        object.__setattr__(self, "slots", tuple(as_slot(slot) for slot in self.slots))
        if not (isinstance(self.ahead, bool) or self.ahead == "pairs"):
            raise Refused(Problem(f"ahead={self.ahead!r}", 'write True, False or "pairs"'))

    def __repr__(self) -> str:
        off = "" if self.overlap else ", overlap=False"
        on = f", ahead={self.ahead!r}" if self.ahead else ""
        return f"Order(slots={self.slots!r}{off}{on})"

    @property
    def steps(self) -> tuple[Slot, ...]:
        """The slots; without overlap every filter is one of its own."""
        if self.overlap:
            return self.slots
        return tuple((wanted,) for slot in self.slots for wanted in slot)

    @property
    def early(self) -> list[bool]:
        """Of each step, whether it may overlap with a neighbour that may, too."""
        every = self.ahead == "pairs"
        return [every or (bool(self.ahead) and len(slot) == 1) for slot in self.steps]

    def rewrite(self, dag: Dag) -> Dag:
        return apply_orders([(Maker(ORDER), self)], dag)


def as_slot(slot: object) -> Slot:
    filters = (slot,) if isinstance(slot, Filter) else slot
    if not isinstance(filters, list | tuple) or not all(isinstance(f, Filter) for f in filters):
        raise Refused(Problem(f"{slot!r} is no slot", "write a filter or a list: [where(PP=0)]"))
    return tuple(filters)


def apply_orders(orders: Sequence[tuple[Maker, Order]], dag: Dag) -> Dag:
    """Many orders as one rewrite: 10,000 slots rebuild nothing 10,000 times."""
    dag = with_split_backwards(dag, (order for _, order in orders))
    lane_of = lanes(dag)
    new: list[Precedence] = []
    for name, order in orders:
        slots = [slot_nodes(dag, slot) for slot in order.steps]
        found = precedences(name, slots, order.early, lane_of)
        new += (replace(one, loose=True) for one in found) if order.ahead == "pairs" else found
    return dag.with_precedences(new)


def with_split_backwards(dag: Dag, orders: Iterable[Order]) -> Dag:
    """Every backward that an order names by its halves becomes two nodes."""
    wanted = dict.fromkeys(
        replace_pass(f) for order in orders for slot in order.slots for f in slot if halves(f)
    )
    cut = {node.id: split_backward(dag, node) for f in wanted for node in dag.select(f)}
    if not cut:
        return dag
    named = {node for p in dag.precedences for node in (*p.before, *p.after)}
    whole = [node for node in cut if node in named]
    if whole:
        raise Refused(
            Problem(
                f"another order names {whole[0]} whole, this one its halves",
                "name it by BI and BW in both",
            )
        )
    nodes: dict[NodeId, Node] = {}
    for node in dag.nodes.values():
        nodes.update((part.id, part) for part in cut.get(node.id, (node,)))
    return replace(dag, nodes=nodes)


def halves(wanted: Filter) -> bool:
    return any(key == PASS and value in (BI, BW) for key, value in wanted.items)


def replace_pass(wanted: Filter) -> Filter:
    return Filter(tuple((k, str(B) if k == PASS else value) for k, value in wanted.items))


def slot_nodes(dag: Dag, slot: Slot) -> list[Compute]:
    nodes = [node for wanted in slot for node in chosen(dag, wanted)]
    homeless = [node for node in nodes if node.devices is None]
    if homeless:
        raise Refused(
            Problem(f"{homeless[0].id} has no device yet", "put its `Place` before this `Order`")
        )
    return nodes


def precedences(
    name: Maker,
    slots: Sequence[Sequence[Compute]],
    early: Sequence[bool],
    lane_of: dict[tuple[int, ...], int],
) -> Iterator[Precedence]:
    """Consecutive slots of each device, as edges between groups.

    Of two `early` ones the second need not wait for the first, but for the one before it.
    """
    refuse_doubles(slots)
    rows: dict[int, list[tuple[tuple[NodeId, ...], bool]]] = {}
    for slot, soon in zip(slots, early, strict=True):
        mine: dict[int, list[NodeId]] = {}
        for node in slot:
            assert node.devices is not None
            mine.setdefault(lane_of[node.devices], []).append(node.id)
        for lane, ids in mine.items():
            rows.setdefault(lane, []).append((tuple(dict.fromkeys(ids)), soon))
    for row in rows.values():
        strict = [not (one[1] and other[1]) for one, other in pairwise(row)]
        for k, (before, _) in enumerate(row[:-1]):
            if strict[k]:
                yield Precedence(before, row[k + 1][0], name)
            if k + 2 < len(row) and not (strict[k] and strict[k + 1]):
                yield Precedence(before, row[k + 2][0], name)
            if k + 2 == len(row) and not strict[k]:
                yield Precedence((), before + row[k + 1][0], name)  # they are named, no more


def refuse_doubles(slots: Sequence[Sequence[Compute]]) -> None:
    seen: dict[NodeId, int] = {}
    for number, slot in enumerate(slots):
        for node in slot:
            if seen.setdefault(node.id, number) != number:
                raise Refused(
                    Problem(
                        f"{node.id} is in slots[{seen[node.id]}] and in slots[{number}]",
                        "name each pass of each microbatch in one slot only",
                    )
                )
