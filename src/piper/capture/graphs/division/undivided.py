"""Work that every device does whole, although a strategy divides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from piper.capture.graphs.division.calls import operands, packet, shape
from piper.capture.graphs.division.notes import shown
from piper.capture.graphs.division.rules import has_rule
from piper.capture.graphs.division.rules.products import HEADS, aten
from piper.capture.graphs.division.search.conversions import Read
from piper.capture.graphs.division.search.plan import Plan
from piper.capture.graphs.division.search.prices import flops
from piper.capture.graphs.division.search.space import Space
from piper.ir.placement.placements import LOCAL, Conversion, Cut, Placement

AXES = {"tokens": "cp", "weights": "tp"}  # what builders call them
LITTLE = 0.01  # of all work: a router, or a head with two classes


def undivided(space: Space, plan: Plan) -> Iterator[str]:
    """Products and attentions that no option divides, and operators without a rule that something
    is sent for, with the reason if it is known."""
    dense = [n for n in space.order if n in space.requests and not space.is_expert(n)]
    least = LITTLE * sum(map(flops, dense))
    gathered = {(read.value, read.target) for read in plan.reads if not is_local(read)}
    whole = (
        node
        for node in dense
        if _is_whole(plan, node)
        and (flops(node) > least or _is_gathered_for(space, plan, node, gathered))
    )
    found = Counter((shown(node), _reason(space, node)) for node in whole)
    for (name, reason), count in found.items():
        yield f"{name}{f' x{count}' if count > 1 else ''}, {reason}"


def is_local(read: Read) -> bool:
    """Whether neither pass sends anything for it."""
    conversion = Conversion(read.source, read.target)
    return conversion.forward in LOCAL and conversion.backward in LOCAL


def _is_gathered_for(
    space: Space, plan: Plan, node: fx.Node, gathered: set[tuple[fx.Node, Placement]]
) -> bool:
    reads = zip(operands(node), plan.options[node].inputs, strict=True)
    return not has_rule(space.call(node)) and not gathered.isdisjoint(reads)


def _is_whole(plan: Plan, node: fx.Node) -> bool:
    option = plan.options[node]
    return not any(isinstance(placement, Cut) for placement in (*option.inputs, option.output))


def _reason(space: Space, node: fx.Node) -> str:
    request, sizes = space.requests[node], shape(node)
    asked = f"{AXES[request.what]}={request.ways}"
    if not has_rule(space.call(node)):
        return f"an operator that Piper does not know how to divide by {asked}"
    if packet(node) is aten.scaled_dot_product_attention and sizes[HEADS] % request.ways:
        return f"which has {sizes[HEADS]} heads: not a multiple of {asked}"
    return f"whose result has the shape {list(sizes)}, which is not divided by {asked}"
