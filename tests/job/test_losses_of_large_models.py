"""Losses of models that are too large for a trial: of labels of the batch, and of means over rows.

The first batch may hide what a loss does with others: balanced classes, one class, one row each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import PiperError
from piper.job.loss import trial_size
from piper.job.loss.loss_reduction import Reduction

CLASSES, WIDTH = 4, 5
SGD = partial(torch.optim.SGD, lr=0.1)
BATCHES = {
    "balanced": [0, 1, 2, 3] * 4,
    "one class": [0] * 16,
    "the last class": [3] * 16,
    "mixed": [0, 0, 1, 3, 2, 2, 2, 0, 1, 0, 3, 3, 0, 0, 0, 1],
}


def counts(y: Tensor) -> Tensor:
    return torch.bincount(y, minlength=CLASSES).double()


def each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def positive(out: Tensor, y: Tensor) -> Tensor:
    t = (y > 0).to(out)
    weight = (len(t) - t.sum()) / t.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(out[:, 0], t, pos_weight=weight)


def rare(out: Tensor, y: Tensor) -> Tensor:
    part = (y == 1).to(out).mean()
    return (torch.where(y == 1, 1 - part, part) * each(out, y)).mean()


def effective(out: Tensor, y: Tensor) -> Tensor:
    weight = 0.1 / (1 - 0.9 ** counts(y).clamp(min=1))
    return F.cross_entropy(out, y, weight=weight / weight.sum())


def over_classes(out: Tensor, y: Tensor) -> Tensor:
    hot = F.one_hot(y, CLASSES).to(out)
    mean = (hot * each(out, y)[:, None]).sum(0) / hot.sum(0).clamp(min=1)
    return mean.sum() / (hot.sum(0) > 0).sum()


OF_LABELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights": lambda o, y: F.cross_entropy(o, y, weight=counts(y).sum() / (counts(y) + 1)),
    "weights of rows": lambda o, y: (each(o, y) / counts(y)[y]).mean(),
    "inverse parts": lambda o, y: F.cross_entropy(o, y, weight=1 / (counts(y) / len(y) + 0.1)),
    "effective": effective,
    "positive": positive,
    "rare": rare,
    "present": lambda o, y: each(o, y).sum() / (counts(y) > 0).sum(),
    "times present": lambda o, y: F.cross_entropy(o, y) * (counts(y) > 0).sum(),
    "largest": lambda o, y: F.cross_entropy(o, y) * counts(y).max() / len(y),
    "unique": lambda o, y: F.cross_entropy(o, y) * y.unique().numel(),
    "prior": lambda o, y: F.cross_entropy(o + (counts(y) / len(y) + 1e-3).log(), y),
    "classes": over_classes,
    "pairs": lambda o, y: (each(o, y) / (y[:, None] == y[None]).sum(1)).mean(),
}


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_size, "LIMIT", 0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def data(labels: list[int]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(len(labels), WIDTH, dtype=torch.float64, generator=draw)
    return x, torch.tensor(labels)


def train(model: nn.Module, loss: Callable[..., Tensor], labels: list[int], parts: int) -> None:
    strategy = [Place(where(), [0]), Split("MB", parts)]
    rehearse(model, loss, strategy, [data(labels)], optimizer=SGD)


@one_of(10)
@pytest.mark.parametrize("parts", [2, 16])
@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("loss", every(3, OF_LABELS.values(), OF_LABELS))
def test_what_labels_of_other_batches_show_is_refused_or_warned_of(
    loss: Callable[[Tensor, Tensor], Tensor],
    labels: list[int],
    parts: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        train(model(), loss, labels, parts)
    except PiperError as error:
        assert "fix:" in str(error)
    else:
        assert "one microbatch and one replica" in caplog.text


@one_of(4)
@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES)
def test_a_mean_that_nothing_proves_is_one_for_all_labels(labels: list[int]) -> None:
    """It is accepted. A loop over rows calls more for more rows, so it gets a warning."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(a, b) for a, b in zip(out, y, strict=True)]).mean()

    train(model(), loss, labels, 4)


class Used(nn.Module):
    """Returns what is computed from all rows beside the logits."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.use = model(), use

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(x)
        return logits, self.use(logits.softmax(-1))


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda p: p.mean(0),
    "mean of one": lambda p: p[:, 0].mean(),
    "means of squares": lambda p: p.square().mean(0),
    "matrix": lambda p: p.T @ p / len(p),
    "mean of all": lambda p: p.square().mean(),
}
BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "squared": lambda m: m.square().sum(),
    "logged": lambda m: -(m * m.log()).sum(),
    "logged alone": lambda m: m.log().sum(),
    "root": lambda m: m.sqrt().sum(),
    "varies": lambda m: m.reshape(-1).var(unbiased=False) + m.exp().mean(),
    "largest": lambda m: m.square().max(),
}
STRAIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda m: m.sum(),
    "scaled": lambda m: 0.01 * m.mean(),
}


@one_of(9)
@pytest.mark.parametrize("bent", BENT.values(), ids=BENT)
@pytest.mark.parametrize("use", every(2, MEANS.values(), MEANS))
def test_a_loss_that_bends_a_mean_of_the_model_is_refused_or_warned_of(
    use: Callable[[Tensor], Tensor],
    bent: Callable[[Tensor], Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + bent(out[1])

    try:
        train(Used(use), loss, BATCHES["mixed"], 4)
    except PiperError as error:
        assert "fix:" in str(error)
    else:
        assert "accumulates gradients" in caplog.text


@one_of(3)
@pytest.mark.parametrize("straight", STRAIGHT.values(), ids=STRAIGHT)
@pytest.mark.parametrize("name", ["mean", "mean of one", "means of squares", "mean of all"])
def test_means_that_are_only_added_are_fine(
    straight: Callable[[Tensor], Tensor], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + straight(out[1])

    train(Used(MEANS[name]), loss, BATCHES["mixed"], 4)
    assert not caplog.text


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = model(), nn.Parameter(torch.ones(CLASSES).double())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.scale.exp()


@pytest.mark.soak
def test_a_vector_of_parameters_is_no_mean() -> None:
    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        each = [F.cross_entropy(a * out[1], b) for a, b in zip(out[0], y, strict=True)]
        return torch.stack(each).mean()

    train(Scaled(), loss, BATCHES["mixed"], 4)


class Own(nn.Module):
    """Computes its own loss, of which only its user can say what it is."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = model(), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layers(x), y)


NOT_PROVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "root": lambda o, y: F.cross_entropy(o, y).sqrt(),
    "logarithm": lambda o, y: o.logsumexp(0).mean() + F.cross_entropy(o, y),
    "a sum beside": lambda o, y: F.cross_entropy(o, y) + 0.01 * o.square().sum(),
    "of classes": lambda o, y: F.cross_entropy(o, y, weight=counts(y).sum() / (counts(y) + 1)),
}


@one_of(6)
@pytest.mark.parametrize("loss", NOT_PROVED.values(), ids=NOT_PROVED)
@pytest.mark.parametrize("said", ["mean", "sum"])
def test_what_only_the_user_says_of_a_loss_is_refused_or_warned_of(
    said: Reduction, loss: Callable[[Tensor, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = [Place(where(), [0]), Split("MB", 4)]
    batches = [data(BATCHES["mixed"])]
    try:
        rehearse(Own(loss), None, strategy, batches, optimizer=SGD, reduction=said)
    except PiperError as error:
        assert "fix:" in str(error)
    else:
        assert "check --numerics" in caplog.text or "one microbatch and one replica" in caplog.text


WITH_NUMBERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "divided": lambda o, y, s: F.cross_entropy(o, y) + s.square().sum() / len(o),
    "times": lambda o, y, s: F.cross_entropy(o, y) + 0.01 * len(o) * s.square().sum(),
    "expanded": lambda o, y, s: F.cross_entropy(o, y) + s.expand(len(o), -1).square().sum(),
    "ones": lambda o, y, s: F.cross_entropy(o, y) + (s * torch.ones(len(o), 1).to(s)).sum(),
    "scaled": lambda o, y, s: F.cross_entropy(o, y) * (len(o) / 2),
    "a tensor": lambda o, y, s: F.cross_entropy(o, y) + s.sum() / o.new_tensor(len(o)),
    "of each row": lambda o, y, s: (each(o, y) + s.square().sum() / len(o)).mean(),
    "more or less": lambda o, y, s: F.cross_entropy(o, y) * (3 if len(o) > 8 else 1),
}
WITHOUT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": lambda o, y, s: F.cross_entropy(o, y) + s.square().sum(),
    "a sum": lambda o, y, s: each(o, y).sum() / len(o) + s.square().mean(),
    "expanded": lambda o, y, s: F.cross_entropy(o * s.expand(len(o), -1), y),
    "a mean": lambda o, y, s: F.cross_entropy(o, y) + s.expand(len(o), -1).square().mean(),
}


class Scales(Own):
    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda out, y: loss(out, y, self.scale))
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))


def trained_alone(own: nn.Module, **options: Any) -> tuple[float, float]:
    """The loss after a step with four microbatches, and that of plain PyTorch."""
    batch, strategy = data(BATCHES["mixed"]), [Place(where(), [0]), Split("MB", 4)]
    wanted = own(*batch).item()
    found = rehearse(own, None, strategy, [batch], optimizer=SGD, **options)
    return found.losses[0], wanted


@one_of(2)
@pytest.mark.parametrize("loss", every(4, WITH_NUMBERS.values(), WITH_NUMBERS))
def test_a_loss_of_its_own_that_counts_rows_is_refused_or_warned_of(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    try:
        trained_alone(Scales(loss))
    except PiperError as error:
        assert "fix:" in str(error)
    else:
        assert "one microbatch and one replica" in caplog.text


@one_of(4)
@pytest.mark.parametrize("loss", WITHOUT.values(), ids=WITHOUT)
def test_a_loss_of_its_own_that_is_a_mean_needs_no_warning(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    found, wanted = trained_alone(Scales(loss))

    assert found == pytest.approx(wanted, rel=1e-12)
    assert not caplog.text
