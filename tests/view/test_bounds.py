"""What a simulated step says of its bounds: the stage by name, and advice that helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from draws import every
from synthetic import chain

from piper.costs import Costs
from piper.ir.model import Model
from piper.job.compile.compiler import compile_strategy
from piper.job.compile.pricing import predict, price
from piper.names import BI, BW, B, F
from piper.sim.prediction import Prediction
from piper.strategies import BUILDERS
from piper.view.reports.bounds import advice, bound

COSTS = Costs(ahead=True, link=1e15, latency=0.0, update=0.0, add=0.0, square=0.0)
STAGES = {"interleaved-1f1b": 4, "interleaved-zb": 4, "zbv": 4, "dualpipev": 4}


def timed(model: Model, seconds: list[float]) -> Model:
    """Stages whose forwards take so long, and their backwards twice as long."""
    regions = tuple(
        replace(one, flops={F: time * 2e9, BI: time * 2e9, BW: time * 2e9, B: time * 4e9})
        for one, time in zip(model.regions, seconds, strict=True)
    )
    return replace(model, regions=regions)


def simulated(name: str, seconds: list[float], microbatches: int = 8) -> Prediction:
    strategy = BUILDERS[name](pp=2, microbatches=microbatches)
    compiled = compile_strategy(timed(chain(len(seconds)), seconds), strategy.directives)
    return predict(compiled, price(compiled, COSTS), COSTS)


@pytest.mark.parametrize("name", every(2, (name for name in BUILDERS if name != "dualpipe")))
def test_the_stage_that_is_longer_is_named_and_other_cuts_help_more_than_microbatches(
    name: str,
) -> None:
    for slow in (0, STAGES.get(name, 2) - 1):
        seconds = [1.0] * STAGES.get(name, 2)
        seconds[slow] = 4.0
        found = simulated(name, seconds)
        device = next(d for d, tags in found.stages.items() if ("PP", slow) in tags)

        shown = advice(found)

        verbs, of = (
            ("bound the step: they compute", "their")
            if len(found.stages[device]) > 1
            else ("bounds the step: it computes", "its")
        )
        assert f"PP={slow}" in shown and f"on device {device} {verbs} " in shown
        assert f"one region: move {of} borders" in shown
        assert "More microbatches hardly help" in shown
        assert bound(found.report, found.stages).startswith("critical path: stage")
        even = simulated(name, [sum(seconds) / len(seconds)] * len(seconds))
        more = simulated(name, seconds, microbatches=16)
        assert even.seconds < more.seconds / 2


def of_layers(seconds: list[float], stages: list[int] | None, costs: Costs = COSTS) -> str:
    """What is advised for two stages of layers, which are cut by other `costs`."""
    model = timed(chain(len(seconds)), seconds)
    layers = tuple(replace(one, tags=(("L", k),)) for k, one in enumerate(model.regions))
    strategy = BUILDERS["1f1b"](pp=2, microbatches=8, stages=stages)
    compiled = compile_strategy(replace(model, regions=layers), strategy.directives, costs=COSTS)
    return advice(predict(compiled, price(compiled, costs), costs))


def test_a_stage_of_layers_gets_fewer() -> None:
    shown = of_layers([1.0] * 6, stages=[1, 5])

    assert "give it fewer layers (`stages=[...]` of a builder), or let a builder cut by" in shown


def test_stages_that_a_builder_has_cut_by_the_same_costs_are_not_told_to_be_cut_so() -> None:
    shown = of_layers([1.0] * 3, stages=None)

    assert "no other cut is faster; smaller layers could be cut more evenly" in shown
    assert "fewer layers" not in shown


def test_stages_that_were_cut_by_other_costs_may_be_cut_by_these() -> None:
    shown = of_layers([1.0] * 3, stages=None, costs=replace(COSTS, flops=2e9))

    assert "let a builder cut by measured times" in shown


def test_the_whole_text() -> None:
    found = simulated("1f1b", [1.0, 4.0])

    assert advice(found) == (
        "advice: stage PP=1 on device 1 bounds the step: it computes 9.60 s, the other one "
        "2.40 s; it is one region: move its borders, or tag smaller ones (`with "
        "piper.annotate(...)`, `piper.tag(model, ...)`), which a builder cuts into stages. More "
        "microbatches hardly help"
    )
    assert bound(found.report, found.stages) == (
        "critical path: stage PP=1 on device 1 (97 %), stage PP=0 on device 0 (3 %)"
    )


def test_a_bubble_of_equal_stages_wants_more_microbatches() -> None:
    found = simulated("gpipe", [1.0, 1.0], microbatches=2)

    assert advice(found) == (
        "advice: devices wait 33 % of the step for the compute of others (the bubble); use more "
        "microbatches, an interleaved schedule or a zero-bubble schedule"
    )
    more = simulated("gpipe", [1.0, 1.0], microbatches=16)
    assert more.seconds / 16 < 0.8 * found.seconds / 2


def test_a_schedule_is_not_advised_to_be_what_it_is() -> None:
    split = advice(simulated("zb-h1", [1.0, 1.0], microbatches=2))
    interleaved = advice(simulated("interleaved-1f1b", [1.0] * 4, microbatches=2))

    assert "interleaved" in split and "zero-bubble" not in split
    assert "zero-bubble" in interleaved and "interleaved" not in interleaved


def test_replicas_of_a_stage_count_as_often_as_there_are() -> None:
    found = simulated("1f1b", [1.0, 4.0])
    several = replace(found, alike={0: (0, 2, 3, 4), 1: (1,)})

    assert "it computes 9.60 s, the others 2.40 s on average" in advice(several)


@pytest.mark.parametrize("microbatches", [2, 8, 24])
def test_messages_between_others_are_no_bubble_that_microbatches_fill(microbatches: int) -> None:
    """Their latency makes up nearly all of the step: so it does with more microbatches."""
    strategy = BUILDERS["gpipe"](pp=4, microbatches=microbatches)
    compiled = compile_strategy(timed(chain(4), [1e-6] * 4), strategy.directives)
    costs = replace(COSTS, latency=1e-3)

    shown = advice(predict(compiled, price(compiled, costs), costs))

    assert "messages" in shown and "bound the step" in shown
    assert "microbatches" not in shown.replace("larger microbatches", "")
