"""Class weights in a buffer: a model's own loss divides by those of its labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F
from trained_as_plain import assert_trains_as_plain

from piper import Place, Replicate, Split, Strategy, Trainer, rehearse, where
from piper.errors import InputError
from piper.strategies import one_f_one_b

ROWS, WIDTH, CLASSES = 8, 4, 5
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
HALVES = Strategy([Place(where(), [0]), Split("MB", 2)])
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_hand(o: Tensor, y: Tensor, w: Tensor) -> Tensor:
    own = w[y]
    return (F.cross_entropy(o, y, reduction="none") * own).sum() / own.sum()


def two_terms(o: Tensor, y: Tensor, w: Tensor) -> Tensor:
    other = F.nll_loss(o.log_softmax(1), y, weight=w)
    return F.cross_entropy(o, y, w) + 0.5 * other


LOSSES: dict[str, Loss] = {
    "weight": lambda o, y, w: F.cross_entropy(o, y, weight=w),
    "smoothed": lambda o, y, w: F.cross_entropy(o, y, weight=w, label_smoothing=0.1),
    "ignored": lambda o, y, w: F.cross_entropy(o, y - 1, weight=w, ignore_index=-1),
    "computed": lambda o, y, w: F.cross_entropy(o, y, weight=w.softmax(0) + 0.1),
    "negative log": lambda o, y, w: F.nll_loss(o.log_softmax(1), y, w),
    "by hand": by_hand,
    "two terms": two_terms,
}
STRATEGIES: dict[str, Strategy] = {
    "halves": HALVES,
    "unequal": Strategy([Place(where(), [0]), Split("MB", 2, sizes=[3, 1])]),
    "pipeline": one_f_one_b(pp=2, microbatches=2),
    "replicas": Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=3)]),
}


class Classifier(nn.Module):
    """`moves`: its forward updates the weights."""

    def __init__(self, loss: Loss, first: float = 0.2, moves: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.loss, self.moves = loss, moves
        self.register_buffer("weights", torch.linspace(first, 2.0, CLASSES))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.moves:
            self.weights.mul_(0.9)
        return self.loss(self.last(torch.tanh(self.first(x))), y, self.weights)


def data(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw)
    return x, torch.randint(1, CLASSES, (ROWS,), generator=draw)


WAYS = [(loss, one) for loss in LOSSES for one in STRATEGIES]


@one_of(4)
@pytest.mark.parametrize(("loss", "strategy"), every(5, WAYS))
def test_models_with_class_weights_train_as_in_plain_pytorch(loss: str, strategy: str) -> None:
    make, batches = partial(Classifier, LOSSES[loss]), [data(seed) for seed in range(3)]

    assert_trains_as_plain(make, STRATEGIES[strategy], batches, SGD)


def test_weights_that_a_forward_updates_are_not_known() -> None:
    model = Classifier(LOSSES["weight"], moves=True)

    with pytest.raises(InputError, match="cannot see how it reduces over rows"):
        rehearse(model, None, HALVES, [data(0)], optimizer=SGD)


@pytest.mark.parametrize("call", ["load", "resume"])
def test_other_weights_in_a_checkpoint_are_refused(tmp_path: Path, call: str) -> None:
    with trainer(0.2) as one:
        one.step(*data(0))
        one.save(tmp_path)
    with trainer(0.2) as same:
        getattr(same, call)(tmp_path)
        same.step(*data(1))

    with trainer(1.0) as other, pytest.raises(InputError) as refused:
        getattr(other, call)(tmp_path)

    assert str(refused.value) == (
        "load: the loss divides by weights (class weights, for instance), which has other values "
        "in what was loaded than in the model that the Trainer was made with\n"
        "  fix: give the model these values of weights before you make the Trainer; or keep them "
        "out of checkpoints: register_buffer(..., persistent=False)"
    )


def trainer(first: float) -> Trainer:
    model = Classifier(LOSSES["weight"], first)
    return Trainer(model, None, HALVES, example=data(0), optimizer=SGD, device="cpu")
