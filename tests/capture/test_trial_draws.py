"""Random numbers of a trial: those of a whole batch are those of its microbatches, in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from draws import one_of
from torch import Tensor, nn

from piper.capture.trace.trials.trial_draws import MADE, Drawn, Kind, MixedNumbers, layouts
from piper.capture.trace.trials.trial_run import TrialRuns

ROWS = 3
DRAWN: dict[str, Callable[[int], Tensor]] = {
    "rand": lambda n: torch.rand(n, 5),
    "rand_like": lambda n: torch.rand_like(torch.ones(5, n)),
    "uniform_": lambda n: torch.empty(n).uniform_(-2, 3),
    "randn": lambda n: torch.randn(2, n, 4),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, 1)),
    "normal": lambda n: torch.normal(torch.arange(4.0).expand(n, 4), 2.0),
    "normal_": lambda n: torch.empty(n, 4).normal_(1.0, 3.0),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 6), 0.2)),
    "bernoulli_": lambda n: torch.empty(n, 6).bernoulli_(0.9),
    "exponential_": lambda n: torch.empty(n, 2).exponential_(3.0),
    "randint": lambda n: torch.randint(3, 9, (n, 4)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n, 4), 7),
    "multinomial": lambda n: torch.multinomial(torch.eye(4)[:3].expand(n, 3, 4)[:, 0] + 0.1, 2),
    "multinomial, again": lambda n: torch.multinomial(torch.ones(n, 4), 9, replacement=True),
    "without rows": lambda n: torch.rand(5),
}


class Draws(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [draw(len(x)).double() for draw in DRAWN.values()]


def drawn(rows: int, numbers: MixedNumbers | None) -> list[Tensor]:
    runs = TrialRuns(Draws(), lambda found, _: sum(map(torch.mean, found)), lambda name: None)
    made = runs.run((torch.zeros(rows), torch.zeros(rows)), None, False, numbers=numbers)
    return made.output


def layout(times: int, kind: Kind = Kind.EXTREME) -> MixedNumbers:
    sizes = times * ROWS, ROWS, ROWS
    shapes = [[Drawn(tuple(one.shape), False) for one in drawn(n, None)] for n in sizes]
    return MixedNumbers(layouts(*shapes, times), None, times, 1, kind, frozenset(), ROWS)


@one_of(2)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("kind", Kind)
def test_microbatches_have_the_numbers_that_their_rows_have_in_the_whole(
    kind: Kind, times: int
) -> None:
    numbers = layout(times, kind)
    whole = drawn(times * ROWS, numbers)
    pair = [drawn(ROWS, replace(numbers, part=part)) for part in (0, 1)]

    for found, one, other, where in zip(whole, *pair, numbers.layouts, strict=True):
        turns = [(one, other)[k % 2] for k in range(times)]
        joined = one if where.dim is None else torch.cat(turns, where.dim)
        torch.testing.assert_close(found, joined, rtol=0, atol=0)


def test_a_draw_has_both_small_and_large_numbers() -> None:
    found = dict(zip(DRAWN, drawn(2 * ROWS, layout(2)), strict=True))

    assert found["rand"].min() < 0.01 < 0.99 < found["rand"].max()
    assert found["randn"].min() < -2 < 2 < found["randn"].max()
    assert {*found["bernoulli"].unique().tolist()} == {0.0, 1.0}
    assert {3.0, 8.0} <= {*found["randint"].unique().tolist()} <= {*map(float, range(3, 9))}
    assert all(len(set(row)) == 2 for row in found["multinomial"].tolist())
    assert {name.partition(",")[0] for name in DRAWN} >= MADE.keys() - {
        "uniform", "exponential", "normal_functional",
    }  # fmt: skip
