"""Work that every device does whole, although a strategy divides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from piper.capture.graphs.division.calls import packet, shape
from piper.capture.graphs.division.notes import shown
from piper.capture.graphs.division.rules.products import HEADS, aten
from piper.capture.graphs.division.search.plan import Plan
from piper.capture.graphs.division.search.prices import flops
from piper.capture.graphs.division.search.space import Space
from piper.ir.placement.placements import Cut

LITTLE = 0.01  # of all work: a router, or a head with two classes


def undivided(space: Space, plan: Plan) -> Iterator[str]:
    """Products and attentions that no option divides, with the reason if it is known."""
    dense = [n for n in space.order if n in space.requests and not space.is_expert(n)]
    least = LITTLE * sum(map(flops, dense))
    whole = (node for node in dense if flops(node) > least and _is_whole(plan, node))
    found = Counter((shown(node), _reason(space, node)) for node in whole)
    for (name, reason), count in found.items():
        yield f"{name}{f' x{count}' if count > 1 else ''}, {reason}"


def _is_whole(plan: Plan, node: fx.Node) -> bool:
    option = plan.options[node]
    return not any(isinstance(placement, Cut) for placement in (*option.inputs, option.output))


def _reason(space: Space, node: fx.Node) -> str:
    ways, sizes = space.requests[node].ways, shape(node)
    if packet(node) is aten.scaled_dot_product_attention and sizes[HEADS] % ways:
        return f"which has {sizes[HEADS]} heads: not a multiple of {ways}"
    return f"whose result has the shape {list(sizes)}"
