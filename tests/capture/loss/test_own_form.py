"""The loss that a model computes itself: what it divides by is known from twice the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.loss import LossForm, own_form
from piper.capture.trace.arguments.inputs import inputs_of

ROWS, WIDTH, PARTS = 8, 4, 4  # microbatches of two rows
Loss = Callable[[Tensor, Tensor], Tensor]
SGD = partial(torch.optim.SGD, lr=0.1)


def elbo(o: Tensor, y: Tensor) -> Tensor:
    divergence = -0.5 * (1 + o - y.square() - o.exp()).sum()
    return (F.mse_loss(o, y, reduction="sum") + divergence) / o.size(0)


def ranking(o: Tensor, y: Tensor) -> Tensor:
    """Of pairs, with a penalty on what was looked up."""
    penalty = (o.norm(2).pow(2) + y.norm(2).pow(2)) / float(len(o))
    return -F.logsigmoid((o * y).sum(1)).mean() + 1e-2 * penalty / 2


LOSSES: dict[str, tuple[str, Loss]] = {
    "over rows": ("mean", lambda o, y: (o - y).square().sum() / len(o)),
    "over all": ("mean", lambda o, y: (o - y).abs().sum() / o.numel()),
    "times": ("mean", lambda o, y: (o - y).abs().sum() * (1 / o.shape[0])),
    "elbo": ("mean", elbo),
    "ranking": ("mean", ranking),
    "divided first": ("mean", lambda o, y: ((o - y).square() / len(o)).sum()),
    "nothing more": ("mean", lambda o, y: (o - y).square().mean() + 0 * o.sum()),
    "nothing before": ("mean", lambda o, y: y.exp().sum() * 0.0 + (o - y).abs().mean()),
    "a sum, nothing more": ("sum", lambda o, y: (o - y).abs().sum() + 0.0 * o.square().mean()),
    "a sum": ("sum", lambda o, y: 0.5 * (o - y).norm() ** 2),
    "over a number": ("sum", lambda o, y: F.mse_loss(o, y, reduction="sum") / 8),
}
NOT_PROVED: dict[str, Loss] = {
    "a root": lambda o, y: (o - y).norm() / len(o),
    "over a square": lambda o, y: (o - y).square().sum() / len(o) ** 2,
    "a sum and a mean": lambda o, y: (o - y).square().sum() + o.mean(),
    "all pairs": lambda o, y: F.cross_entropy(o @ y.T, torch.arange(len(o))),
    "a product": lambda o, y: (o.sum() / len(o)) * (y * o).mean(),
    "next to nothing": lambda o, y: (o - y).square().mean() + 1e-9 * o.sum(),
    "nothing of two rows": lambda o, y: (o - y).square().mean() + (len(o) - 2) * o.sum(),
    "zeros for each row": lambda o, y: ((o - y).square().mean() + 0 * o).sum(),
    "a count of sums": lambda o, y: (o - y).abs().sum() / y.sum(0).count_nonzero(),
    "more rows": lambda o, y: (o - y).square().sum() / (len(o) + 1),
}


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.loss = nn.Linear(WIDTH, WIDTH), loss
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.first(x)), y)


def data(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, ROWS, WIDTH, dtype=torch.float64, generator=draw)
    return x, y


@pytest.mark.parametrize("name", every(2, LOSSES))
def test_what_is_proved_holds(name: str) -> None:
    kind, loss = LOSSES[name]
    model, (x, y) = Model(loss), data(1)
    pairs = list(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True))
    form = own_form(model, inputs_of(pairs[0]), "cpu", None, LossForm())

    together = sum(float(model(*pair).detach()) for pair in pairs) / (
        PARTS if kind == "mean" else 1
    )

    assert form.kind == kind
    assert together == pytest.approx(float(model(x, y).detach()), rel=1e-12)


@one_of(2)
@pytest.mark.parametrize("name", NOT_PROVED)
def test_what_does_not_hold_is_not_proved(name: str) -> None:
    example = tuple(one[:2] for one in data(1))

    assert (
        own_form(Model(NOT_PROVED[name]), inputs_of(example), "cpu", None, LossForm()).kind is None
    )


@pytest.mark.parametrize(("kind", "loss"), every(4, LOSSES.values(), LOSSES))
def test_models_with_such_a_loss_train_as_in_plain_pytorch(kind: str, loss: Loss) -> None:
    model, batches = Model(loss), [data(1), data(2)]
    losses = plain_losses(SGD(model.parameters()), batches, model)

    found = rehearse(
        Model(loss), None, [Place(where(), [0]), Split("MB", PARTS)], batches, optimizer=SGD
    )

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found.parameters[name], parameter.detach(), rtol=1e-10, atol=1e-12
        )
