"""What recomputing frees and costs, and what does not fit, as text and on the page."""

from __future__ import annotations

from dataclasses import replace

from synthetic import chain

from piper.directives import Place, Remat, Strategy
from piper.ir.filters import where
from piper.ir.model import Model, Region
from piper.ir.remat_policy import Recomputation
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.names import B, F
from piper.plan.analyse.memory import Peak
from piper.sim.prediction import Prediction
from piper.sim.report import Report
from piper.view.reports.recomputation import recomputation
from piper.view.reports.simulation_text import memory
from piper.view.view_data import ViewData, view_data


def described(region: Region) -> Region:
    kept = replace(region, flops={F: 1e9, B: 2e9})
    again = replace(region, flops={F: 1e9, B: 3e9}, recomputes=Recomputation((), 3 * 2**20, 1e9))
    some = replace(region, flops={F: 1e9, B: 2.5e9}, recomputes=Recomputation(0.5, 2**20, 0.5e9))
    return replace(kept, recomputed={(): again, 0.5: some})


def model(regions: int) -> Model:
    plain = chain(regions)
    return replace(plain, regions=tuple(map(described, plain.regions)))


def compiled(regions: int, *remats: Remat) -> Compiled:
    return compile_strategy(model(regions), Strategy([Place(where(), [0]), *remats]))


def test_a_line_for_each_policy() -> None:
    found = compiled(7, *(Remat(where(PP=k)) for k in range(6)), Remat(where(PP=6), 0.5))

    assert recomputation(found.dag).splitlines() == [
        "PP0, PP1, PP2, PP3 and 2 more regions recompute, and keep inputs: "
        "18.0 MiB less, 6 GFLOP more (29 % of all), per microbatch",
        "PP6 recomputes, and keeps inputs and 50 % of the activations: "
        "1.0 MiB less, 500 MFLOP more (2 % of all), per microbatch",
    ]


def test_nothing_is_said_if_nothing_is_recomputed() -> None:
    assert recomputation(compiled(2).dag) == ""


def test_a_choice_that_keeps_everything_says_so() -> None:
    found = compiled(2, Remat(where(), "auto"))

    assert recomputation(found.dag) == (
        "PP0, PP1 would recompute, but everything fits: all is kept"
    )


def test_backwards_on_the_page_say_what_they_repeat() -> None:
    found = compiled(2, Remat(where(PP=0)))
    data = ViewData.from_json(view_data("run", found.dag, found.plans).to_json())

    said = dict(zip(data.nodes["id"], data.nodes["recomputes"], strict=True))
    assert said["PP0:B"] == "1 GFLOP, 3.0 MiB less; keeps inputs"
    assert not said["PP0:F"] and not said["PP1:B"]


def test_what_does_not_fit_says_how_to_find_what_would() -> None:
    peaks = {0: Peak(3 * 2**30, 0, {}), 1: Peak(2**30, 0, {})}
    found = Prediction(Report(1.0, (), (), {}), peaks, {0: (0, 2), 1: (1,)}, 8, None, 2.0 * 2**30)

    assert memory(found) == (
        "peak memory 3.0 GiB on devices 0, 2: does NOT fit in 2.0 GiB; "
        "`piper check --memory 2` shows what would fit"
    )
