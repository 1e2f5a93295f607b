"""Losses that divide by how many elements a mask chooses, where a microbatch has none of them.

The gradient of a mean over nothing is zero if only what is chosen is summed, and else it is NaN.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, rehearse, where
from piper.errors import InputError
from piper.runtime import steps_in_flight

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of outputs, labels and a mask


def each(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y.clamp(min=0), reduction="none")


def over_own(found: Tensor) -> Tensor:
    return found.sum() / found.numel()


ALONE: dict[str, Loss] = {
    "a sum of the chosen": lambda o, y, m: each(o, y)[m].sum() / m.nonzero().size(0),
    "their own number": lambda o, y, m: over_own(each(o, y)[m]),
    "each divided": lambda o, y, m: (each(o, y)[m] / m.nonzero().size(0)).sum(),
    "a mean": lambda o, y, m: each(o, y)[m].mean(),
    "cross_entropy": lambda o, y, m: F.cross_entropy(o[m], y[m]),
    "a sum of cross_entropy": lambda o, y, m: (
        F.cross_entropy(o[m], y[m], reduction="sum") / y[m].numel()
    ),
    "minus": lambda o, y, m: -(-1 * each(o, y)[m].sum()) / y[m].numel(),
}
BESIDE: dict[str, Loss] = {
    "all rows times a mask": lambda o, y, m: (each(o, y) * m).sum() / m.nonzero().size(0),
    "a selected mask": lambda o, y, m: (each(o, y) * m).sum() / m.float()[m].numel(),
    "each divided": lambda o, y, m: (each(o, y) * m / m.nonzero().size(0)).sum(),
    "where": lambda o, y, m: torch.where(m, each(o, y), 0.0).sum() / m.nonzero().size(0),
    "masked_select": lambda o, y, m: (
        (each(o, y) * m).sum() / torch.masked_select(o[:, 0].detach(), m).numel()
    ),
    "a mean and another": lambda o, y, m: (
        each(o, y)[m].mean() + (o[:, 0].square() * m).sum() / m.nonzero().size(0)
    ),
    "both sums": lambda o, y, m: (
        (each(o, y)[m].sum() + (o[:, 0].square() * m).sum()) / m.nonzero().size(0)
    ),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Nothing is chosen in the first half of the second one."""
    draw = torch.Generator().manual_seed(3)
    found = [(torch.randn(8, 6, generator=draw), torch.arange(8) % 5) for _ in range(3)]
    labels = found[1][1].clone()
    labels[:4] = -1
    return [found[0], (found[1][0], labels), found[2]]


def trained(loss: Loss, parts: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    strategy = [Place(where(), [0]), Split("MB", parts)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    given = lambda o, y: loss(o, y, y >= 0)  # noqa: E731
    return rehearse(model, given, strategy, batches(), optimizer=sgd).parameters["weight"]


def plain(loss: Loss) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        sgd.zero_grad()
        loss(model(x), y, y >= 0).backward()
        sgd.step()
    return model.weight.detach()


@one_of(2)
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("name", ALONE)
def test_sums_of_the_chosen_train_as_in_plain_pytorch(name: str, parts: int) -> None:
    torch.testing.assert_close(trained(ALONE[name], parts), plain(ALONE[name]))


@one_of(2)
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("name", BESIDE)
def test_gradients_that_would_be_nan_are_refused(name: str, parts: int) -> None:
    assert plain(BESIDE[name]).isfinite().all()
    with pytest.raises(InputError, match="a mean over nothing is not a number"):
        trained(BESIDE[name], parts)


def shares(o: Tensor, y: Tensor) -> Tensor:
    """Piper does not see what it counts."""
    chosen = y >= 0
    return (each(o, y) * chosen).sum() / torch.bincount(chosen.long(), minlength=2)[1]


@pytest.mark.parametrize("rehearsed", [False, True])
def test_a_microbatch_that_alone_is_not_finite_is_warned_of(
    rehearsed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps_in_flight.warn_of_lost.cache_clear()
    model, strategy = nn.Linear(6, 5), [Place(where(), [0]), Split("MB", 8)]
    with caplog.at_level(logging.WARNING, "piper"):
        if rehearsed:
            rehearse(model, shares, strategy, batches())
        else:
            with Trainer(model, shares, strategy, example=batches()[0], device="cpu") as trainer:
                found = [trainer.step(*batch).loss for batch in batches()]
            assert not torch.tensor(found).isfinite().all()

    assert "the loss of microbatch 0 is not finite, and those of others are" in caplog.text


def test_a_loss_that_is_not_finite_at_all_is_left_to_on_nan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps_in_flight.warn_of_lost.cache_clear()
    for loss, parts in ((2.0, {0: 1.0, 1: float("nan")}), (float("nan"), {0: float("nan")})):
        steps_in_flight.tell_of_lost(loss, parts)

    assert not caplog.messages
