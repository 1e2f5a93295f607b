"""Attentions whose rows are divided, although a strategy divides tokens: both are possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from piper.capture.graphs.division.calls import packet, shape
from piper.capture.graphs.division.notes import shown
from piper.capture.graphs.division.rules.products import aten
from piper.capture.graphs.division.search.plan import Plan
from piper.capture.graphs.division.search.space import Space
from piper.ir.placement.placements import Cut

# Their results are [rows, heads, tokens, ...].
ATTENTIONS = (aten.scaled_dot_product_attention, aten.softmax, aten._softmax)


def divided_by_rows(space: Space, plan: Plan) -> Iterator[str]:
    """Attentions over whole sequences, each device for some of the rows."""
    asked = (n for n in space.order if n in space.requests and space.requests[n].what == "tokens")
    found = Counter(shown(node) for node in asked if _is_by_rows(plan, node))
    return (f"{name} x{count}" if count > 1 else name for name, count in found.items())


def _is_by_rows(plan: Plan, node: fx.Node) -> bool:
    if packet(node) not in ATTENTIONS or len(shape(node)) != 4:
        return False
    return plan.options[node].output == Cut(0)
