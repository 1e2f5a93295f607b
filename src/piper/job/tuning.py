"""From what devices measured to the costs that a strategy is compiled with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from piper.ir.costs import Costs
from piper.runtime.observe.measure import Measured, Timings, medians


def read_costs(costs: Costs | str | Path | None) -> Costs | None:
    """Costs, or a file of them."""
    return Costs.from_json(Path(costs).read_text()) if isinstance(costs, str | Path) else costs


def costs_of(seen: Sequence[Measured]) -> Costs:
    """What all devices saw, each by code."""
    latency = [seconds for one in seen for seconds in one.latency]
    return Costs(
        compute=medians([one.compute for one in seen]),
        streams=medians([one.streams for one in seen]),
        latency=statistics.median(latency) if latency else Costs().latency,
    )


def by_code(compute: Timings, codes: Mapping[str, str]) -> Timings:
    """Equal regions take equally long."""
    found: Timings = {}
    for name, times in compute.items():
        region, phase = name.rsplit(" ", 1)
        found.setdefault(f"{codes[region]} {phase}", []).extend(times)
    return found
