"""What a strategy does to the whole model at once, said to its user. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from piper.directives import Directive, Offload, Remat, Replicate, Strategy
from piper.job.compile.division import by_rows_lines, undivided_lines

if TYPE_CHECKING:
    from piper.capture import Captured


def by_layer(strategy: Strategy) -> str | None:
    """What works on one region at a time, so that layers save memory or let messages overlap."""
    return next(filter(None, map(by_layer_text, strategy)), None)


def by_layer_text(one: Directive) -> str | None:
    match one:
        case Replicate() if one.zero and len(set(one.devices)) > 1:
            return f"zero={one.zero}"
        case Remat() | Offload():
            return type(one).__name__.lower()
        case _:
            return None


def whole_model_lines(strategy: Strategy, captured: Captured) -> Iterator[str]:
    """Which regions are not divided, and what is done at once that could be done by layers."""
    yield from undivided_lines(captured.undivided)
    yield from by_rows_lines(captured.by_rows)
    if (what := by_layer(strategy)) and len(captured.model.regions) == 1:
        from piper.capture.regions.layers import BY_HAND

        yield (
            f"{what} works on the whole model at once, which is one region: no layers were found; "
            f"to work layer by layer, {BY_HAND}"
        )
