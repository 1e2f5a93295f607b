"""What was not measured is scaled from what was, never taken from a constant without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from costs.worked import Sketch, all_phases, model_of
from draws import drawn, draws
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.costs import Costs
from piper.costs.measured import Figure, RegionKey, Source, figures_of, works_of
from piper.costs.modes import Mode
from piper.ir.model import Model
from piper.names import BI, B, F, Phase

GPU = Costs(flops=1e14, memory=1e12, start=5e-6, launch=1e-5, ahead=True)
SMALL, LARGE = Sketch("small", 1e9), Sketch("large", 2e9)  # one layer, two microbatch sizes
OTHER = Sketch("other", 1e9, width=8)


def measured(
    model: Model, factor: float, *codes: str, mode: Mode = Mode.EAGER, costs: Costs | None = None
) -> Costs:
    """Costs in which these regions took so many times their estimate."""
    found = costs or Costs()
    estimated = replace(found, figures={})
    seconds = {
        (region.code, phase): factor * estimated.region(model, region, phase)
        for region in model.regions
        if region.code in codes
        for phase in Phase
    }
    return found.with_figures(figures_of(works_of(model), seconds, mode))


def times(costs: Costs, model: Model) -> dict[tuple[str, Phase], float]:
    return {
        (region.code, phase): costs.region(model, region, phase)
        for region in model.regions
        for phase in Phase
    }


def sources(costs: Costs, model: Model) -> set[Source]:
    return {costs.source(model, region, phase) for region in model.regions for phase in Phase}


def test_a_region_of_the_same_structure_counts_before_others() -> None:
    model = model_of([SMALL, OTHER])
    costs = measured(model, 3.0, "other", costs=measured(model, 7.0, "small"))
    larger = model_of([LARGE])

    found = costs.region(larger, larger.regions[0], F)

    assert found == pytest.approx(7 * Costs().region(larger, larger.regions[0], F))
    assert costs.source(larger, larger.regions[0], F) is Source.SCALED


def test_without_such_a_region_the_median_of_its_phase_counts() -> None:
    model = model_of([SMALL, OTHER, Sketch("third", 3e9, width=2)])
    costs = Costs()
    for factor, code in ((3.0, "small"), (100.0, "other"), (7.0, "third")):
        costs = measured(model, factor, code, costs=costs)
    wide = model_of([Sketch("wide", 5e9, width=16)])

    found = costs.region(wide, wide.regions[0], F)

    assert found == pytest.approx(7 * Costs().region(wide, wide.regions[0], F))


def test_a_phase_that_was_never_measured_goes_by_the_others() -> None:
    model = model_of([SMALL])
    whole = measured(model, 7.0, "small")
    costs = replace(whole, figures={k: v for k, v in whole.figures.items() if k.phase in (F, B)})

    found = costs.region(model, model.regions[0], BI)

    assert found == pytest.approx(7 * Costs().region(model, model.regions[0], BI))


def test_a_region_without_counted_work_is_like_those_that_were_measured() -> None:
    model = model_of([SMALL])
    unknown = replace(model, regions=(replace(model.regions[0], code="unknown", flops={}),))
    costs = Costs(figures={RegionKey("a", F): Figure(0.25), RegionKey("b", F): Figure(0.75)})

    assert costs.region(unknown, unknown.regions[0], F) == 0.5
    assert costs.region(unknown, unknown.regions[0], B) == 1.0


def test_what_was_measured_is_taken_as_it_is() -> None:
    model = model_of([SMALL, LARGE])
    costs = measured(model, 7.0, "small")

    assert costs.source(model, model.regions[0], F) is Source.MEASURED
    assert costs.region(model, model.regions[0], F) == costs.figures[RegionKey("small", F)].seconds


def test_with_nothing_measured_there_are_estimates() -> None:
    model = model_of([SMALL, LARGE])

    assert sources(Costs(), model) == {Source.ESTIMATED}
    assert sources(Costs(figures={RegionKey("other", F): Figure(1.0)}), model) == {Source.ESTIMATED}


def test_modes_are_scaled_by_what_both_have() -> None:
    model = model_of([SMALL, LARGE])
    eager = measured(model, 6.0, "small", "large")
    both = measured(model, 2.0, "small", mode=Mode.COMPILED, costs=eager)

    found = both.in_mode(Mode.COMPILED)

    assert times(found, model) == pytest.approx(
        {key: seconds / 3 for key, seconds in times(eager, model).items()}
    )
    assert found.source(model, model.regions[1], F) is Source.SCALED


def test_figures_of_another_mode_are_not_taken_silently() -> None:
    model = model_of([SMALL, LARGE])
    eager = measured(model, 6.0, "small")

    found = eager.in_mode(Mode.GRAPHS)

    assert times(found, model) == times(eager, model)
    assert sources(found, model) == {Source.OTHER_MODE}


SKETCHES = st.lists(
    st.builds(
        Sketch, st.sampled_from("abcdefgh"), st.floats(1e6, 1e12), st.integers(0, 50),
        st.sampled_from([2, 4, 8]),
    ),
    min_size=2, max_size=6, unique_by=lambda one: one.code,
)  # fmt: skip


@pytest.mark.soak
@drawn
@settings(max_examples=draws(25, 100))
@given(SKETCHES, st.data(), st.floats(0.01, 100.0), st.sampled_from([Costs(), GPU]))
def test_what_was_not_measured_follows_what_was(
    sketches: list[Sketch], data: st.DataObject, k: float, costs: Costs
) -> None:
    model = model_of(sketches)
    pairs = st.tuples(st.sampled_from(all_phases(model)), st.sampled_from(Mode))
    chosen = data.draw(st.dictionaries(pairs, st.floats(1e-6, 1.0), min_size=1))
    wanted = data.draw(st.sampled_from(Mode))

    def with_figures(factor: float) -> Costs:
        found = costs
        for (key, mode), seconds in chosen.items():
            found = found.with_figures(figures_of(works_of(model), {key: factor * seconds}, mode))
        return found.in_mode(wanted)

    once, scaled = with_figures(1.0), with_figures(k)

    assert times(scaled, model) == pytest.approx(
        {key: k * seconds for key, seconds in times(once, model).items()}, rel=1e-9, abs=0.0
    )
    assert Source.ESTIMATED not in sources(once, model)
