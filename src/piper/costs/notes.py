"""What a user must know of costs that were not all measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from piper.costs.costs import Costs
from piper.costs.estimate import Work, work_of
from piper.costs.measured import Source
from piper.ir.model import Model
from piper.names import Phase, amount

FREE = {"add": "sums of gradients", "square": "the gradient norm", "update": "the optimizer"}


def notes(costs: Costs, model: Model, runs: Iterable[tuple[str, Phase]]) -> tuple[str, ...]:
    """One sentence for each kind of time that was not measured; `runs` are codes and phases."""
    regions = {region.code: region for region in model.regions}
    asked = dict.fromkeys(runs)
    found = Counter(costs.source(model, regions[code], phase) for code, phase in asked)
    works = [work_of(model, regions[code], phase) for code, phase in asked]
    return (*of_regions(costs, found), *of_launches(costs, works), *of_others(costs))


def of_regions(costs: Costs, found: Counter[Source]) -> Iterator[str]:
    count = amount(found.total(), "figure")
    if not costs.figures:
        yield "nothing was measured: regions are estimated from FLOPs and bytes"
        return
    if scaled := found[Source.SCALED]:
        yield (
            f"scaled from other measurements: {scaled} of {count}; "
            "measure them with --profile at this microbatch size"
        )
    if other := found[Source.OTHER_MODE]:
        modes = ", ".join(dict.fromkeys(key.mode for key in costs.figures))
        yield (
            f"measured in another mode ({modes}): {other} of {count}; "
            f"nothing measured says how mode {costs.mode} differs"
        )
    if estimated := found[Source.ESTIMATED]:
        yield (
            f"estimated from FLOPs and bytes: {estimated} of {count}; "
            "measure them with --profile at this microbatch size"
        )


def of_launches(costs: Costs, works: Sequence[Work | None]) -> Iterator[str]:
    """A small model is slower on a GPU than its FLOPs and bytes: nobody should wonder why."""
    known = [work for work in works if work is not None]
    late = [
        one for one in known if costs.of_host(one, costs.mode) > costs.of_device(one, costs.mode)
    ]
    if 2 * len(late) > len(known) and not costs.figures:
        yield (
            f"the host takes longer to launch most operators ({1e6 * costs.launch:.0f} us each) "
            "than the device to compute them; larger microbatches help, and so do CUDA graphs, "
            "which a Trainer uses by default where they are faster"
        )


def of_others(costs: Costs) -> Iterator[str]:
    """Beside measured regions, these are easily taken for measured, too."""
    if costs.figures and costs.link == Costs.link:
        yield f"links were not measured: {costs.link / 1e9:g} GB/s unless --network says otherwise"
    free = [words for name, words in FREE.items() if costs.figures and not getattr(costs, name)]
    if free:
        yield f"not measured, and counted as nothing: {', '.join(free)}"
