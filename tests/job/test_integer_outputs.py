"""Losses that use truths and integers that a model returns, and weights that are 1 at first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import InputError
from piper.job.loss import trial_size

SGD = partial(torch.optim.SGD, lr=0.1)
Make = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Any, Any], Tensor]


class Net(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make = nn.Linear(6, 5), make
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return logits, self.make(logits, x)


def each(o: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(o[0], y, reduction="none")


def padding(h: Tensor, x: Tensor) -> Tensor:
    return x[:, 0] > 0.3


def expert(h: Tensor, x: Tensor) -> Tensor:
    return h.argmax(1)


BATCHES: dict[str, tuple[Make, Loss]] = {
    "unmasked": (padding, lambda o, y: (each(o, y) * ~o[1]).sum() / (~o[1]).sum()),
    "masked": (padding, lambda o, y: (each(o, y) * o[1]).sum() / (o[1].sum() + 1e-6)),
    "chosen": (padding, lambda o, y: each(o, y)[~o[1]].mean()),
    "first class": (expert, lambda o, y: each(o, y)[o[1] == 0].mean()),
    "balance": (
        expert,
        lambda o, y: (
            each(o, y).mean() + (torch.bincount(o[1], minlength=5) / len(y)).square().sum()
        ),
    ),
}
ROWS: dict[str, tuple[Make, Loss]] = {
    "truths": (padding, lambda o, y: (each(o, y) * o[1]).mean()),
    "numbers": (expert, lambda o, y: (each(o, y) * o[1]).mean()),
}


@pytest.fixture(params=[False, True], ids=["small", "large"], autouse=True)
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(trial_size, "LIMIT", 0)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64, generator=draw)
    return x, torch.randint(5, (8,), generator=draw)


def losses(model: nn.Module, loss: Loss, parts: int, given: Any) -> float:
    strategy = [Place(where(), [0]), Split("MB", parts)]
    return rehearse(model, loss, strategy, [given], optimizer=SGD).losses[0]


@one_of(8)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_means_over_what_the_model_chooses_are_refused(name: str, parts: int) -> None:
    make, loss = BATCHES[name]

    with pytest.raises(InputError, match="fix:"):
        losses(Net(make), loss, parts, batch())


@one_of(2)
@pytest.mark.parametrize("name", ROWS)
def test_means_over_rows_train(name: str) -> None:
    make, loss = ROWS[name]
    model, (x, y) = Net(make), batch()
    wanted = loss(model(x), y).item()

    assert losses(model, loss, 4, (x, y)) == pytest.approx(wanted, rel=1e-12)


def weighed(o: Tensor, y: Any, by: Callable[[Tensor], Tensor]) -> Tensor:
    labels, weights = y
    return (F.cross_entropy(o, labels, reduction="none") * by(weights)).mean()


@one_of(2)
@pytest.mark.parametrize(
    "by", [lambda w: w / w.max(), lambda w: w * len(w) / w.sum()], ids=["largest", "sum"]
)
def test_weights_that_are_one_at_first_may_be_others_later(by: Callable[[Tensor], Tensor]) -> None:
    x, y = batch()

    with pytest.raises(InputError, match="would not add up"):
        losses(
            nn.Linear(6, 5).double(), partial(weighed, by=by), 2, (x, (y, torch.ones(8).double()))
        )


def test_plain_weights_train() -> None:
    x, y = batch()
    model, given = nn.Linear(6, 5).double(), (x, (y, torch.ones(8).double()))
    wanted = F.cross_entropy(model(x), y).item()

    assert losses(model, partial(weighed, by=lambda w: w), 2, given) == pytest.approx(wanted)
