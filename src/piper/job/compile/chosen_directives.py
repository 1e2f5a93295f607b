"""Directives of a strategy as a job compiles them, and what its log says of the result."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from piper.capture import Captured
from piper.directives import Directive, Stage, Strategy
from piper.job.compile.compiler import Compiled
from piper.names import amount

LOG = logging.getLogger("piper")
QUICK = 0.05  # seconds


def is_cut(strategy: Strategy) -> bool:
    """Whether some directive makes several stages of the model."""
    stages = (d.stages for d in strategy if isinstance(d, Stage))
    return any(stage > 1 if isinstance(stage, int) else len(stage) > 1 for stage in stages)


def log_capture(captured: Captured, seconds: float) -> None:
    """What was captured before takes no time, and is no news."""
    level = logging.INFO if seconds >= QUICK else logging.DEBUG
    LOG.log(level, "captured %s in %.1f s", regions_text(captured), seconds)


def regions_text(captured: Captured) -> str:
    regions = captured.model.regions
    unique = len({region.code for region in regions})
    different = [f"{unique} distinct"] if unique < len(regions) else []
    read = [f"{captured.was_read} from the cache"] if captured.was_read else []
    notes = ", ".join(different + read)
    return amount(len(regions), "region") + (f" ({notes})" if notes else "")


def plans_text(compiled: Compiled) -> str:
    count = sum(len(plan.instructions) for plan in compiled.plans)
    plans = amount(len(compiled.plans), "plan")
    devices = len(compiled.roles.of)
    whose = f" for {amount(devices, 'device')}" if devices > len(compiled.plans) else ""
    return f"and checked {plans}{whose}, {amount(count, 'instruction')}"


def with_stages(strategy: Strategy, compiled: Sequence[Directive]) -> Strategy:
    """A strategy with the stages that were cut.

    What to recompute is chosen anew for each kind of batch. A single stage has all layers, of which
    another kind of batch may have more.
    """
    stages = (one for one in compiled if isinstance(one, Stage))
    pairs = ((one, next(stages) if isinstance(one, Stage) else one) for one in strategy)
    return Strategy(one if isinstance(one, Stage) and one.count == 1 else cut for one, cut in pairs)
