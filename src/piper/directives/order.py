"""Order: when regions run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from typing import Literal, cast

from piper.directives.arguments import Slot, Slots, as_slots
from piper.directives.base import Directive, directive
from piper.directives.crossing_orders import note_crossings
from piper.directives.selection import selected
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Both, Either, Filter
from piper.ir.maker import ORDER, Maker
from piper.ir.message_order import (
    MessageOrder,
    OrderSlot,
    named_passes,
    names_operations,
    without_operations,
)
from piper.ir.nodes import Compute, Node, Precedence
from piper.ir.training import split_backward
from piper.names import BI, BW, OF, PASS, STEP, B, NodeId, Operation

Ahead = bool | Literal["pairs"]
Lanes = dict[tuple[int, ...], int]


@directive(
    keys={"slots": "filters"},
    omit_defaults=("overlap", "ahead"),
    example='Order([where(PASS="F"), where(PASS="B")])',
)
@dataclass(frozen=True, slots=True)
class Order(Directive):
    """Run each slot before the next, on its devices. Filters in one slot may overlap.

    `PASS="BI"` and `PASS="BW"` split that backward into its two halves. `PASS="UPDATE"`,
    `"REDUCE"`, `"GATHER"`, `"SEND"`, `"RECV"`, `"DISPATCH"` and `"COMBINE"` name what is not a pass
    of a region. `OF="F"` or `OF="B"` says whether a message belongs to a forward or a backward.
    `STEP=1`, in the last slot, names passes of the next step.

    Piper interleaves the filters of a slot, so that the communication of one hides behind the
    compute of another. With `overlap=False` they run in the order in which you list them. To order
    regions one by one, `where(PP=0, RUN=1, ...)` is the second region with these tags.

    With `ahead=True`, the second of two neighbouring slots may start while the first waits for its
    tokens, if each has one filter; a slot of weight gradients (BW) counts to the slot before it.
    With `ahead="pairs"`, so may the second of any two, and the weight gradients that Piper splits
    off a backward may run that much later again. Where that would take longer, as with few
    microbatches or short messages, Piper runs the slots in turn.

    rewrite:
        a    b                  Order([[a], [b]]), with no path between them
        -->
        a -> b                  on each device, all of a slot before any of the next
    """

    slots: Slots
    overlap: bool = True
    ahead: Ahead = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", as_slots(self.slots))
        if not isinstance(self.overlap, bool):
            raise Refused(Problem(f"overlap={self.overlap!r} is not a bool", "write True or False"))
        if not (isinstance(self.ahead, bool) or self.ahead == "pairs"):
            fix = 'write True, False or "pairs"'
            raise Refused(Problem(f"ahead={self.ahead!r} is not supported", fix))

    @property
    def steps(self) -> tuple[Slot, ...]:
        """The slots. Without overlap every filter is a slot of its own."""
        slots = cast(tuple[Slot, ...], self.slots)
        return slots if self.overlap else tuple((wanted,) for slot in slots for wanted in slot)

    @property
    def may_overlap(self) -> list[bool]:
        """For each step, whether it may overlap with a neighbour that may, too."""
        every = self.ahead == "pairs"
        return [every or (bool(self.ahead) and len(slot) == 1) for slot in self.steps]

    def rewrite(self, dag: Dag) -> Dag:
        return self.rewrite_all([(Maker(ORDER), self)], dag)

    @staticmethod
    def rewrite_all(named: Sequence[tuple[Maker, Order]], dag: Dag) -> Dag:
        dag = with_split_backwards(dag, (order for _, order in named))
        lane_of = dag.lanes
        new: list[Precedence] = []
        stricter: list[list[Precedence]] = [[] for _ in LESS]
        waiting: list[MessageOrder] = []
        of_passes: list[tuple[Maker, Sequence[Sequence[Compute]]]] = []
        for name, order in named:
            steps, later = next_step(dag, order.steps)
            mixed = later or any(names_operations(wanted) for slot in steps for wanted in slot)
            slots = [slot_nodes(dag, passes(slot) if mixed else slot) for slot in steps]
            found = precedences(name, slots, Freedom.of(order), lane_of)
            if order.ahead:
                for others, freedom in zip(stricter, LESS, strict=True):
                    others += precedences(name, slots, freedom, lane_of)
            if mixed:
                waiting.append(message_order(dag, name, order, steps, slots, later))
                found = (replace(one, partial=True) for one in found)
            else:
                of_passes.append((name, slots))
            new += (replace(one, loose=True) for one in found) if order.ahead == "pairs" else found
        note_crossings(dag, of_passes, lane_of)
        dag = dag.with_precedences(new).with_stricter(map(tuple, filter(None, stricter)))
        return dag.with_message_orders(waiting) if waiting else dag


def with_split_backwards(dag: Dag, orders: Iterable[Order]) -> Dag:
    """Every backward that an order names by its halves becomes two nodes."""
    wanted = dict.fromkeys(
        whole_backward(f) for order in orders for slot in order.steps for f in slot if is_half(f)
    )
    cut = {node.id: split_backward(dag, node) for f in wanted for node in dag.select(f)}
    if not cut:
        return dag
    named = {node for p in dag.precedences for node in (*p.before, *p.after)}
    named |= {node for o in dag.message_orders for slot in o.slots for node in slot.nodes}
    whole = [node for node in cut if node in named]
    if whole:
        what = f"another order names the whole backward {whole[0]}, this one its halves"
        raise Refused(Problem(what, "write BI and BW in both orders"))
    nodes: dict[NodeId, Node] = {}
    for node in dag.nodes.values():
        nodes.update((part.id, part) for part in cut.get(node.id, (node,)))
    return replace(dag, nodes=nodes)


def is_half(wanted: Filter) -> bool:
    return not HALVES.isdisjoint(wanted.items)


HALVES = {(PASS, str(BI)), (PASS, str(BW))}


def whole_backward(wanted: Filter) -> Filter:
    return Filter(tuple((k, str(B) if k == PASS else value) for k, value in wanted.items))


def passes(slot: Slot) -> Slot:
    return tuple(wanted for wanted in slot if not names_operations(wanted))


def slot_nodes(dag: Dag, slot: Slot) -> list[Compute]:
    nodes = [node for wanted in slot for node in pass_nodes(dag, wanted)]
    unplaced = [node for node in nodes if node.devices is None]
    if unplaced:
        fix = "put its `Place` before this `Order`"
        raise Refused(Problem(f"{unplaced[0].id} has no device yet", fix))
    return nodes


def pass_nodes(dag: Dag, wanted: Filter) -> list[Compute]:
    try:
        return selected(dag, wanted)
    except Refused:
        for problem in misunderstandings(wanted):
            raise Refused(problem) from None
        if is_untrained(dag, wanted):
            return []
        raise


def is_untrained(dag: Dag, wanted: Filter) -> bool:
    """Whether it names backwards of regions that have none: they and all before are frozen.

    A schedule need not know that. The rest of it stays as it is.
    """
    tags = tuple(item for item in wanted.items if item[0] != PASS)
    phase = dict(wanted.items).get(PASS)
    if type(wanted) is not Filter or phase not in (B, BI, BW):
        return False
    found = {node.region for node in dag.select(Filter(tags))}
    return bool(found) and not any(dag.model.by_id[region].has_backward for region in found)


def misunderstandings(wanted: Filter) -> Iterator[Problem]:
    """Keys that make sense, but not here."""
    if OF in wanted.keys:
        fix = f'add the message, such as {PASS}="SEND", or leave {OF} out'
        yield Problem(f"{wanted}: {OF} is for messages, not for passes", fix)
    if STEP in wanted.keys:
        fix = "put passes of the next step in a slot of their own, at the end of the order"
        yield Problem(f"{wanted} is not of this step", fix)


def next_step(dag: Dag, steps: tuple[Slot, ...]) -> tuple[tuple[Slot, ...], tuple[NodeId, ...]]:
    """The slots without the last, if that is about the next step; and what is in it then."""
    last = steps[-1] if steps else ()
    if not last or STEP in dag.tag_names or not all(STEP in wanted.keys for wanted in last):
        return steps, ()
    if len(steps) == 1:
        fix = "put what it waits for into a slot before it"
        raise Refused(Problem(f"{last[0]} waits for nothing", fix))
    nodes = [node for wanted in last for node in pass_nodes(dag, of_this_step(wanted))]
    return steps[:-1], tuple(dict.fromkeys(node.id for node in nodes))


def of_this_step(wanted: Filter) -> Filter:
    """The filter for the same passes of this step."""
    if type(wanted) is not Filter or dict(wanted.items)[STEP] != 1:
        fix = "write a filter with STEP=1 for each: an order reaches as far as the next step"
        raise Refused(Problem(f"{wanted} is not a pass of the next step", fix))
    if names_operations(wanted):
        fix = "name the first pass that comes after it"
        raise Refused(Problem(f"{wanted}: only passes can be of the next step", fix))
    return Filter(tuple(item for item in wanted.items if item[0] != STEP))


def message_order(
    dag: Dag, name: Maker, order: Order, steps: Sequence[Slot],
    slots: Sequence[Sequence[Compute]], later: tuple[NodeId, ...],
) -> MessageOrder:  # fmt: skip
    """The order as it waits for the nodes that passes make. Its tags must exist now."""
    if order.ahead:
        what = f"ahead={order.ahead!r} is not supported in an order that names messages or updates"
        raise Refused(Problem(what, "put what may overlap in one slot"))
    filters = [
        tuple(one for wanted in filter(names_operations, slot) for one in alternatives(wanted))
        for slot in steps
    ]
    for wanted in (wanted for slot in filters for wanted in slot):
        pass_nodes(dag, without_operations(wanted))
    ids = [tuple(dict.fromkeys(node.id for node in slot)) for slot in slots]
    found = [*map(OrderSlot, ids, filters), *([OrderSlot(later=later)] if later else [])]
    return MessageOrder(tuple(found), name)


def alternatives(wanted: Filter) -> Iterator[Filter]:
    """The parts of `a | b`, each of which says whether it means sends, reductions or others."""
    if isinstance(wanted, Either):
        for part in wanted.parts:
            yield from alternatives(part)
        return
    parts = wanted.parts if isinstance(wanted, Both) else (wanted,)
    said = [part for part in parts if PASS in part.keys]
    right = len(said) == 1 and type(said[0]) is Filter
    if not right or not all(one in tuple(Operation) for one in named_passes(wanted)):
        what = f"{wanted} names messages or updates as one of several"
        fix = 'write a filter for each in one slot: where(PASS="SEND"), where(PASS="F")'
        raise Refused(Problem(what, fix))
    yield wanted


@dataclass(frozen=True, slots=True)
class Group:
    """A slot on one lane, and the weight gradients after it that may run as soon as they can."""

    passes: tuple[NodeId, ...]
    loose: bool  # it may overlap with a neighbour that may, too
    weights: tuple[NodeId, ...] = ()

    @property
    def all(self) -> tuple[NodeId, ...]:
        return self.passes + self.weights


@dataclass(frozen=True, slots=True)
class Freedom:
    """Which slots may overlap with a neighbour that may, too, and whether weight gradients may."""

    slots: tuple[bool, ...] = ()
    weights: bool = False

    @classmethod
    def of(cls, order: Order) -> Freedom:
        return cls(tuple(order.may_overlap), bool(order.ahead))


LESS = (Freedom(weights=True), Freedom())


def precedences(
    name: Maker, slots: Sequence[Sequence[Compute]], freedom: Freedom, lane_of: Lanes
) -> Iterator[Precedence]:
    """Consecutive slots of each device, as edges between groups of nodes.

    If two neighbours may overlap, the second waits only for the slot before the first.
    """
    for groups in groups_by_lane(slots, freedom, lane_of).values():
        strict = [not (one.loose and other.loose) for one, other in pairwise(groups)]
        for k, group in enumerate(groups[:-1]):
            if strict[k]:
                yield Precedence(group.all, groups[k + 1].passes, name)
            if k + 2 < len(groups) and not (strict[k] and strict[k + 1]):
                yield Precedence(group.all, groups[k + 2].passes, name)
        if groups[-1].weights or not all(strict[-1:]):  # names them, and orders nothing
            yield Precedence((), tuple(chain.from_iterable(g.all for g in groups[-2:])), name)


def groups_by_lane(
    slots: Sequence[Sequence[Compute]], freedom: Freedom, lane_of: Lanes
) -> dict[int, list[Group]]:
    """If weight gradients are free, a slot of them joins the slot before it.

    They have no messages of their own: they hide those of the passes beside them.
    """
    require_one_slot_each(slots)
    found: dict[int, list[Group]] = {}
    for slot, loose in zip(slots, chain(freedom.slots, repeat(False)), strict=False):
        for lane, nodes in on_lanes(slot, lane_of).items():
            ids, groups = tuple(nodes), found.setdefault(lane, [])
            if freedom.weights and groups and all(node.phase is BW for node in nodes.values()):
                groups[-1] = replace(groups[-1], weights=groups[-1].weights + ids)
            else:
                groups.append(Group(ids, loose))
    return found


def on_lanes(slot: Sequence[Compute], lane_of: Lanes) -> dict[int, dict[NodeId, Compute]]:
    found: dict[int, dict[NodeId, Compute]] = {}
    for node in slot:
        assert node.devices is not None
        found.setdefault(lane_of[node.devices], {})[node.id] = node
    return found


def require_one_slot_each(slots: Sequence[Sequence[Compute]]) -> None:
    seen: dict[NodeId, int] = {}
    for number, slot in enumerate(slots):
        for node in slot:
            if seen.setdefault(node.id, number) != number:
                what = f"{node.id} is in both slots[{seen[node.id]}] and slots[{number}]"
                fix = "name each pass of each microbatch in one slot only"
                raise Refused(Problem(what, fix))
