"""Stages are cut by time: estimated, or measured."""

from __future__ import annotations

from dataclasses import replace

from synthetic import chain

from piper import Place, Remat, Split, Stage, Strategy, where
from piper.costs import Costs
from piper.costs.measured import Figure, RegionKey
from piper.ir.model import Model
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.pricing import price
from piper.job.compile.stage_weights import stage_lines, stage_table
from piper.names import B, F
from piper.strategies import one_f_one_b
from piper.strategies.cuts import with_cuts

HEAD = 3.5  # the last layer weighs as much as so many others


def model(layers: int = 12) -> Model:
    """Layers of equal work, the last one with a head. Every region has a code of its own."""
    found = chain(layers)
    work = [1e9] * (layers - 1) + [HEAD * 1e9]
    regions = tuple(
        replace(r, code=f"layer {k}", tags=(("L", k),), flops={F: work[k], B: 2 * work[k]})
        for k, r in enumerate(found.regions)
    )
    return replace(found, regions=regions)


def sizes(program: tuple, model: Model, costs: Costs) -> object:
    return next(one.stages for one in with_cuts(program, model, costs) if isinstance(one, Stage))


def test_estimates_cut_off_a_heavy_head() -> None:
    assert sizes((Stage("PP", 4),), model(), Costs()) == (3, 4, 4, 1)


def test_measured_times_cut_where_they_were_measured() -> None:
    slow = {
        RegionKey(f"layer {k}", phase): Figure(17.0 if k == 0 and phase is B else 1.0)
        for k in range(12)
        for phase in (F, B)
    }

    assert sizes((Stage("PP", 3),), model(), Costs(figures=slow)) == (1, 5, 6)


def test_sizes_by_hand_and_other_directives_stay_as_they_are() -> None:
    program = (Remat(where(L=0)), Stage("PP", [2, 10]), Stage("PP", 13))

    assert with_cuts(program, model(), Costs()) == program, "the last one is refused when applied"


def test_a_second_cut_groups_the_stages_of_the_first() -> None:
    first, second = with_cuts((Stage("PP", 4), Stage("HALF", 2)), model(), Costs())

    assert (first, second) == (Stage("PP", (3, 4, 4, 1)), Stage("HALF", (2, 2)))


def even_and_cut(pp: int) -> tuple[Compiled, Compiled]:
    by_hand = one_f_one_b(pp=pp, microbatches=8, stages=[12 // pp] * pp)
    return tuple(  # type: ignore[return-value]
        compile_strategy(model(), strategy.directives)
        for strategy in (by_hand, one_f_one_b(pp=pp, microbatches=8))
    )


def test_a_cut_by_time_takes_less_of_it_than_an_even_one() -> None:
    for pp, saved in ((2, 0.05), (4, 0.2)):
        even, cut = (price(one).seconds for one in even_and_cut(pp))

        assert cut < even * (1 - saved)


def test_what_was_cut_is_told() -> None:
    _, compiled = even_and_cut(2)

    assert stage_lines(compiled) == [
        "cut into 2 stages: PP=0 L 0 to 6 (48 % of the time), PP=1 L 7 to 11 (52 %), "
        "by estimates for one CPU core per device"
    ]
    assert stage_table(compiled).splitlines()[:2] == [
        "stage  layers     parameters  FLOPs  time  activations",
        "PP=0   L 0 to 6          112   48 %  48 %        416 B",
    ]
    plain = compile_strategy(model(), one_f_one_b(pp=1, microbatches=1).directives)
    assert not stage_lines(plain) and not stage_table(plain)


def test_stages_that_the_user_tagged_are_not_called_layers() -> None:
    compiled = compile_strategy(chain(2), one_f_one_b(pp=2, microbatches=2).directives)

    assert stage_lines(compiled)[0].startswith("2 stages, as tagged: PP=0 (50 % of the")


def test_a_strategy_that_is_written_by_hand_has_the_stages_that_it_places() -> None:
    built = compile_strategy(chain(2), one_f_one_b(pp=2, microbatches=2).directives)
    places = [Place(where(PP=stage), devices=[stage]) for stage in (0, 1)]

    by_hand = compile_strategy(chain(2), [*places, Split("MB", 2)])

    assert stage_table(by_hand) == stage_table(built)
    assert not stage_lines(by_hand)  # Piper has not cut anything
    alone = [Place(where(), devices=[0]), Split("MB", 2)]
    assert not stage_table(compile_strategy(chain(2), alone))


def test_the_strategy_that_was_cut_is_the_one_that_is_applied() -> None:
    _, compiled = even_and_cut(4)

    assert compiled.program[0] == Stage("PP", (3, 4, 4, 1))
    assert Strategy(compiled.program[1:]) == Strategy(
        one_f_one_b(pp=4, microbatches=8).directives[1:]
    )
