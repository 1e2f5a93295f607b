"""A loss that divides by a function of how many count, where a microbatch has none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import one_of
from small_training import SGD, TWO, Net, assert_equal, data, plainly
from torch import Tensor

from piper import Split, rehearse
from piper.errors import InputError

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda n: n.sqrt(),
    "square": lambda n: n.square(),
    "logarithm": lambda n: n.log(),
    "of one more": lambda n: (n + 1).log(),
}
AT_LEAST: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda n: n.clamp(min=1).sqrt(),
    "logarithm": lambda n: (n + 2).log(),
}


def loss_with(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        mask = (y[:, 0] > -100).to(y.dtype)
        return ((output - y).square().mean(1) * mask).sum() / function(mask.sum())

    return loss_fn


def batches() -> list[tuple[Tensor, Tensor]]:
    """Nothing counts in the second of four microbatches."""
    ignored = torch.tensor([False] * 3 + [True] * 3 + [False] * 6)[:, None]
    return [(x, torch.where(ignored, -100.0, y)) for x, y in data()]


@one_of(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_microbatch_that_would_be_divided_by_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="microbatch 1 is divided by"):
        rehearse(Net(), loss_with(FUNCTIONS[name]), [*TWO, Split("MB", 4)], batches())


@one_of(2)
@pytest.mark.parametrize("name", AT_LEAST)
def test_functions_of_at_least_one_train_as_in_plain_pytorch(name: str) -> None:
    loss_fn = loss_with(AT_LEAST[name])

    result = rehearse(Net(), loss_fn, [*TWO, Split("MB", 4)], batches(), optimizer=SGD)

    assert_equal(result, plainly(Net(), loss_fn, batches()))
