"""Bubbles and memory of well-known schedules, for unit costs, are those of their papers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from draws import one_of
from sim.atomic import atomic
from synthetic import chain

from piper.costs import Costs
from piper.costs.costs import Host
from piper.costs.links import NETWORKS
from piper.ir.model import Model
from piper.ir.values import TensorSpec
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.pricing import Prices, price
from piper.plan.analyse.memory import ACTIVATIONS, peak
from piper.sim.clock import Simulated, simulate
from piper.sim.report import report
from piper.strategies import BUILDERS
from piper.view.reports.overlap import overlapped

UNITS = [Costs(), Costs(ahead=True)]  # F, BI, BW take a second each; a host that blocks or not
SIZES = [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)]
STAGES = {"interleaved-1f1b": 2, "zbv": 2, "dualpipev": 2}


@cache
def scheduled(name: str, pp: int, microbatches: int) -> Compiled:
    return compiled(name, pp, microbatches)


def compiled(name: str, pp: int, microbatches: int, model: Model | None = None) -> Compiled:
    strategy = BUILDERS[name](pp=pp, microbatches=microbatches)
    return compile_strategy(model or chain(STAGES.get(name, 1) * pp), strategy.directives)


def idle(found: Simulated) -> set[float]:
    """What each device does not compute of the step."""
    return {round(found.seconds - one.compute, 6) for one in report(found).devices}


@one_of(2)
@pytest.mark.parametrize("costs", UNITS, ids=["blocks", "ahead"])
@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
def test_the_bubble_is_the_closed_form(name: str, pp: int, microbatches: int, costs: Costs) -> None:
    forms = {"zb-h1": (pp - 1) * (1 + 2 - 2)}  # (PP-1) (F + B - 2W)
    found = price(scheduled(name, pp, microbatches), costs, NETWORKS["none"])

    assert idle(found) == {forms.get(name, (pp - 1) * (1 + 2))}  # (PP-1) (F + B)


@one_of(2)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_zbv_has_no_bubble_between_its_first_and_last_work(pp: int) -> None:
    found = price(compiled("zbv", pp, 4 * pp), Costs(), NETWORKS["none"])

    for one in report(found).devices:
        spans = [s for s in found.trace.spans[one.device] if s.end > s.start]
        own = max(s.end for s in spans) - min(s.start for s in spans)
        assert own == pytest.approx(one.compute)


@one_of(2)
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [("dualpipe", 4, 4), ("dualpipe", 8, 8), ("dualpipev", 2, 4), ("dualpipev", 4, 8)],
)
def test_dualpipe_as_published_and_better(name: str, ranks: int, stages: int) -> None:
    """(PP/2-1) (F&B + B - 3W), with PP stages and F&B = F + B: a pair is one piece of work there.

    Piper sends what the first of a pair made as soon as it is there, and idles half as long.
    """
    one = compiled(name, ranks, 4 * ranks)
    pairs = overlapped(one.dag)
    plans = [atomic(plan, pairs) for plan in one.plans]
    prices = Prices(one.dag, Costs(), one.plans)

    published = simulate(plans, prices, NETWORKS["none"], Host(blocks=True))
    finer = price(one, Costs(), NETWORKS["none"])

    assert idle(published) == {(stages / 2 - 1) * (3 + 2 - 3)}
    assert idle(finer) == {(stages / 2 - 1) * 1}


def heavy(stages: int) -> Model:
    """Only what is saved for the backward weighs something."""
    model, big = chain(stages), TensorSpec((2**20,))
    regions = tuple(replace(one, saved=(big,), carry=(big,)) for one in model.regions)
    return replace(model, regions=regions)


@one_of(2)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_live_activations_are_those_of_the_table(pp: int) -> None:
    """1F1B and ZB-H1 hold PP, DualPipe and DualPipeV PP+1 (PP stages), GPipe all microbatches."""
    mib = 4 * 2**20
    rows = [("gpipe", pp, 2 * pp, 2 * pp), ("1f1b", pp, 4 * pp, pp), ("zb-h1", pp, 4 * pp, pp)]
    rows += [("dualpipev", pp, 4 * pp, 2 * pp + 1)]
    rows += [("dualpipe", pp, 4 * pp, pp + 1)] if pp > 2 else []
    for name, ranks, microbatches, live in rows:
        one = compiled(name, ranks, microbatches, heavy(STAGES.get(name, 1) * ranks))
        most = max(peak(one.dag, plan).held[ACTIVATIONS] for plan in one.plans)
        assert (name, most // mib) == (name, live)
