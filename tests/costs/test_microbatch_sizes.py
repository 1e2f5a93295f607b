"""Costs of one microbatch size serve a sweep over others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper.capture import annotate, capture
from piper.costs import Costs
from piper.costs.measured import figures_of, works_of
from piper.costs.modes import Mode
from piper.ir.model import Model
from piper.job.compile.compiler import compile_strategy
from piper.job.compile.pricing import predict, price
from piper.names import F, Phase
from piper.strategies import BUILDERS

ROWS, WIDTH, SLOW = 16, 32, 7.0  # sequences of a batch; measured is so many times the estimate
FAST_LINK = Costs(link=1e12, latency=0.0)


class Two(nn.Module):
    """Two equal stages, of a few layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            with annotate("PP"):
                x = x + stage(x)
        return x


@pytest.fixture(scope="module")
def models() -> dict[int, Model]:
    """The same model captured for microbatches of a half, a quarter and an eighth of the batch."""
    model, found = Two(), {}
    for count in (2, 4, 8):
        rows = torch.zeros(ROWS // count, 64, WIDTH)
        found[count] = capture(model, mse_loss, (rows, rows)).model
    return found


def profiled(model: Model) -> Costs:
    """Made up, so that nothing depends on this machine."""
    seconds = {
        (region.code, phase): SLOW * FAST_LINK.region(model, region, phase)
        for region in model.regions
        for phase in Phase
    }
    return FAST_LINK.with_figures(figures_of(works_of(model), seconds, Mode.EAGER))


@pytest.mark.soak
def test_a_region_takes_as_much_longer_as_its_microbatch_is_larger(models) -> None:
    costs = profiled(models[4])

    for k in range(2):
        two, four, eight = (costs.region(models[n], models[n].regions[k], F) for n in (2, 4, 8))

        assert 1.6 < two / four <= 2.0  # its parameters are read once, whatever the microbatch
        assert 0.5 <= eight / four < 0.65


def test_a_sweep_goes_one_way_and_says_what_was_scaled(models) -> None:
    costs, steps = profiled(models[4]), {}
    for count, model in models.items():
        strategy = BUILDERS["1f1b"](pp=2, microbatches=count)
        compiled = compile_strategy(model, strategy.directives)
        steps[count] = predict(compiled, price(compiled, costs), costs)

    bubbles = {count: 1 + 1 / count for count in steps}  # of a pipeline of two, over its work
    assert steps[2].seconds > steps[4].seconds > steps[8].seconds
    for count in (2, 8):
        assert steps[count].seconds / steps[4].seconds == pytest.approx(
            bubbles[count] / bubbles[4], rel=0.05
        )
    assert not any("scaled" in note for note in steps[4].notes)
    assert steps[2].notes[0].startswith("scaled from other measurements: 4 of 4 figures")
