"""Where `Stage` cuts: so that the slowest stage takes as little time as possible."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from piper.costs import Costs
from piper.directives import Directive, Stage
from piper.errors import Refused
from piper.ir.model import Model, Region
from piper.names import B, F, RegionId


def with_cuts(program: Iterable[Directive], model: Model, costs: Costs) -> tuple[Directive, ...]:
    """Every `Stage` with a number of stages says which layers they have.

    What cannot be cut stays as it is: applying it says why.
    """
    found: list[Directive] = []
    for one in program:
        if isinstance(one, Stage):
            with suppress(Refused):
                one, model = one.cut(model, seconds_of(model, costs))  # noqa: PLW2901
        found.append(one)
    return tuple(found)


def seconds_of(model: Model, costs: Costs) -> dict[RegionId, float]:
    """How long regions take for one microbatch, forward and backward."""
    return {region.id: seconds(model, region, costs) for region in model.regions}


def seconds(model: Model, region: Region, costs: Costs) -> float:
    phases = (F, B) if region.has_backward else (F,)
    return sum(costs.region(model, region, phase) for phase in phases)
