"""Which inputs may have another number of rows: the model runs once for inputs and labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draws import one_of
from torch import Tensor, nn

from piper.capture.trace.arguments.batch_dimension import batch_dimension
from piper.capture.trace.arguments.inputs import inputs_of
from piper.capture.trace.row_calls import unvalued_run
from piper.job.batch.other_sizes import OtherSizes, tried

ROWS, WIDTH = 4, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        return self.linear(x) if more is None else self.linear(x) + more


def for_each_row(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y)


def shared(output: Tensor, y: Tensor) -> Tensor:
    """Labels are a table of any length."""
    return (output @ y.T).square().mean()


def of_two(output: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output, y[0]) + F.mse_loss(output, y[1])


def of_the_first(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output[: len(y)], y)


def for_four_only(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output.view(ROWS, WIDTH), y)


X = torch.zeros(ROWS, WIDTH)
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rows": (for_each_row, (X, X)),
    "a table": (shared, (X, X)),
    "two inputs": (for_each_row, (X, X, X)),
    "two labels": (of_two, (X, (X, X))),
    "the first": (of_the_first, (X, X)),
    "four only": (for_four_only, (X, X)),
    "another length": (shared, (X, torch.zeros(ROWS + 1, WIDTH))),
    "a number": (lambda output, y: F.mse_loss(output, output * y), (X, torch.zeros(()))),
}


@one_of(2)
@pytest.mark.parametrize("loss_fn, arguments", CASES.values(), ids=CASES)
def test_it_is_found_as_if_each_size_were_run(loss_fn: Any, arguments: tuple[Any, ...]) -> None:
    given = Net(), loss_fn, inputs_of(arguments), "cpu", None

    def runs(shapes: Any) -> bool:
        return OtherSizes(*given).runs(shapes)

    sizes = OtherSizes(*given)
    plain = batch_dimension(sizes.known, runs, sizes.taken)
    assert tried(*given) == (plain if plain.groups or runs(sizes.known) else None)


@pytest.mark.parametrize("loss_fn, groups", [(for_each_row, 1), (shared, 2)])
def test_a_model_with_labels_runs_once(
    loss_fn: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards, run = list[Any](), unvalued_run.model_output
    monkeypatch.setattr(
        unvalued_run, "model_output", lambda *given: (forwards.append(given), run(*given))[1]
    )
    found = tried(Net(), loss_fn, inputs_of((X, X)), "cpu", None)

    assert found is not None and len(found.groups) == groups
    assert len(forwards) == 1
