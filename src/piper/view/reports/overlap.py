"""The order of overlapping work, and how much communication it is predicted to hide."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from piper.ir.dag import Dag
from piper.ir.nodes import Compute, Exchange
from piper.names import F, NodeId, Phase, RegionId, amount
from piper.view.reports.footprint import devices_text

Span = tuple[float, float]
Pattern = tuple[tuple[RegionId, Phase], ...]
SHOWN = 3  # slots for each device
NAMES = (
    "order of overlapping work: PP1.EP0:BI@2 is stage 1, its experts 0, input gradients, "
    "microbatch 2; PP1 and PP1#1 are the parts before and after the experts"
)
WIDE = 12  # nodes


def overlap(dag: Dag) -> str:
    """Empty without sharded experts: then there is no token all-to-all to hide."""
    found = list(lines(dag)) if dag.shardings else []
    return "\n".join([*found, NAMES] if found else [])


def lines(dag: Dag) -> Iterator[str]:
    table, spans_of = dag.lanes, lane_spans(dag)
    for lane in sorted(spans_of):
        busy = Busy(spans_of[lane])
        exchanges = [node for node in dag.nodes.values() if isinstance(node, Exchange)]
        own = [node for node in exchanges if table[node.devices] == lane]
        names = sorted({d for devices, k in table.items() if k == lane for d in devices})
        spans = [dag.times[node.id] for node in own if node.id in dag.times]
        total = sum(end - start for start, end in spans)
        hidden = sum(busy.during(span) for span in spans)
        if spans:
            yield (
                f"{devices_text(names)}  {amount(len(spans), 'token all-to-all')}, "
                f"{time_text(total)} predicted, {100 * hidden / total:.0f} % hidden behind compute"
            )
        yield from slot_lines(dag, lane, table)


def slot_lines(dag: Dag, lane: int, table: dict[tuple[int, ...], int]) -> Iterator[str]:
    """The first few kinds of slots. Slots that differ only in microbatches are of one kind."""
    found: dict[Pattern, list[tuple[NodeId, ...]]] = {}
    for slot in overlapped(dag):
        node = dag.nodes[slot[0]]
        assert isinstance(node, Compute) and node.devices is not None
        if table[node.devices] == lane:
            order = sorted(slot, key=lambda name: dag.times[name][0])
            found.setdefault(pattern(dag, order), []).append(tuple(order))
    if not found:
        yield f"  in the middle of the step: {' '.join(middle(dag, lane, table))}"
    for alike in list(found.values())[:SHOWN]:
        yield f"  {times(len(alike))}: {' '.join(alike[0])}"
    if len(found) > SHOWN:
        yield f"  and {amount(len(found) - SHOWN, 'other combination')}"


def times(count: int) -> str:
    """
    >>> times(1), times(5)
    ('once', '5 times')
    """
    return "once" if count == 1 else f"{count} times"


def middle(dag: Dag, lane: int, table: dict[tuple[int, ...], int]) -> list[NodeId]:
    """Nodes of a lane from the middle of the step, in order."""
    nodes = [n for n in dag.computes if n.devices and table[n.devices] == lane]
    order = sorted((n.id for n in nodes), key=lambda name: dag.times[name][0])
    half = len(order) // 2
    return order[half : half + WIDE]


def overlapped(dag: Dag) -> list[tuple[NodeId, ...]]:
    """Slots of orders in which several passes overlap on a device."""
    made = [order for order in dag.precedences if order.maker.is_order and not order.partial]
    orders = [order for order in made if order.before]
    slots = dict.fromkeys(names for order in orders for names in (order.before, order.after))
    whole: dict[
        NodeId, tuple[NodeId, ...]
    ] = {}  # a slot without its late BW is not a slot of its own
    for slot in slots:
        whole.update((name, slot) for name in slot if len(slot) > len(whole.get(name, ())))
    several = (slot for slot in slots if len({part_of(dag, name) for name in slot}) > 1)
    return [slot for slot in several if whole[slot[0]] == slot]


def part_of(dag: Dag, name: NodeId) -> tuple[bool, int | None]:
    """Direction and microbatch: BI and BW of one microbatch are one pass."""
    node = dag.nodes[name]
    assert isinstance(node, Compute)
    return node.phase is F, node.microbatch


def pattern(dag: Dag, order: Sequence[NodeId]) -> Pattern:
    """What a slot does, for any microbatches."""
    nodes = (dag.nodes[name] for name in order)
    return tuple((node.region, node.phase) for node in nodes if isinstance(node, Compute))


def lane_spans(dag: Dag) -> dict[int, list[Span]]:
    """When each lane computes."""
    table, found = dag.lanes, dict[int, list[Span]]()
    for node in dag.computes:
        if node.id in dag.times and node.devices:
            found.setdefault(table[node.devices], []).append(dag.times[node.id])
    return {lane: sorted(spans) for lane, spans in found.items()}


class Busy:
    """Disjoint spans, and how much of a time they cover."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.starts = [start for start, _ in spans]
        self.before = [0.0, *accumulate(end - start for start, end in spans)]
        self.spans = spans

    def until(self, time: float) -> float:
        k = bisect_right(self.starts, time)
        if not k:
            return 0.0
        start, end = self.spans[k - 1]
        return self.before[k - 1] + min(time, end) - start

    def during(self, span: Span) -> float:
        """
        >>> Busy([(0.0, 1.0), (2.0, 4.0)]).during((0.5, 3.0))
        1.5
        """
        return self.until(span[1]) - self.until(span[0])


def time_text(seconds: float) -> str:
    """
    >>> time_text(0.0123)
    '12.3 ms'
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
