"""Functions of rows that a mask selects, whose number depends on data: those of torch, exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, annotate, rehearse, where
from piper.errors import CaptureError

CLASSES = 6
SGD = partial(torch.optim.SGD, lr=0.1)
PARTS = [Place(where(), [0]), Split("MB", 2)]
Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and labels


def labels_as_probabilities(y: Tensor) -> Tensor:
    return 0.9 * F.one_hot(y, CLASSES).double() + 0.1 / CLASSES


def chosen(z: Tensor, y: Tensor) -> Tensor:
    return z.gather(1, y[:, None])[:, 0]


LOSSES: dict[str, Loss] = {
    "log of a sum": lambda z, y: (z.logsumexp(-1) - chosen(z, y)).mean(),
    "kept": lambda z, y: -chosen(z - torch.logsumexp(z, dim=1, keepdim=True), y).mean(),
    "forbidden": lambda z, y: z.index_fill(1, torch.tensor([0]), -torch.inf).logsumexp(1).mean(),
    "all forbidden": lambda z, y: (
        torch.full_like(z, -torch.inf).logsumexp(1).exp().sum() + z.mean()
    ),
    "categorical": lambda z, y: -torch.distributions.Categorical(logits=z).log_prob(y).mean(),
    "entropy": lambda z, y: torch.distributions.Categorical(logits=z).entropy().mean(),
    "sigmoid": lambda z, y: -F.logsigmoid(z - z.detach().mean(1, keepdim=True)).mean(),
    "sigmoid of zero": lambda z, y: -F.logsigmoid(z * 0.0).mean() + F.logsigmoid(60 * z).mean(),
    "module": lambda z, y: -nn.LogSigmoid()(z).mean(),
    "probabilities": lambda z, y: F.cross_entropy(z, labels_as_probabilities(y)),
    "their sum": lambda z, y: F.cross_entropy(z, labels_as_probabilities(y), reduction="sum"),
}


class Selecting(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.loss = nn.Linear(6, 6), nn.Linear(6, CLASSES), loss
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = y >= 0
        return self.loss(self.head(torch.tanh(self.first(x))[kept]), y[kept])


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, dtype=torch.float64, generator=draw)
    return x, torch.randint(-2, CLASSES, (8,), generator=draw)


@one_of(4)
@pytest.mark.parametrize("loss", every(4, LOSSES.values(), LOSSES))
def test_losses_of_selected_rows_are_those_of_torch(loss: Loss) -> None:
    batches, model = [batch(1), batch(2)], Selecting(loss)
    right = plain_losses(SGD(model.parameters()), batches, model)

    found = rehearse(Selecting(loss), None, None, batches, optimizer=SGD)

    assert found.losses == pytest.approx(right, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-10, atol=0)


MEANS = {name: LOSSES[name] for name in ("log of a sum", "kept", "entropy", "sigmoid")}


@pytest.mark.parametrize("loss", every(4, MEANS.values(), MEANS))
def test_a_mean_over_selected_rows_weighs_microbatches_by_them(loss: Loss) -> None:
    batches, model = [batch(1), batch(2)], Selecting(loss)
    right = plain_losses(SGD(model.parameters()), batches, model)

    found = rehearse(Selecting(model.loss), None, PARTS, batches, optimizer=SGD)

    assert found.losses == pytest.approx(right, rel=1e-12)


def test_a_derivative_that_torch_cannot_follow_is_named() -> None:
    model = Selecting(F.multi_margin_loss)

    with pytest.raises(CaptureError, match=r"test_selected_rows.py:.*multi_margin_loss_backward"):
        rehearse(model, None, None, [batch(1)], optimizer=SGD)


class Stages(Selecting):
    """The rows that are selected in a stage are an input of the next."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = y >= 0
        with annotate("PP"):
            hidden = torch.tanh(self.first(x))[kept]
        with annotate("PP"):
            return self.loss(self.head(hidden), y[kept])


@pytest.mark.soak
@pytest.mark.parametrize("parts", every(2, [2, 1]))
def test_selected_rows_go_from_stage_to_stage(parts: int) -> None:
    stages = [Place(where(PP=0), [0]), Place(where(PP=1), [0]), Split("MB", parts)]
    batches, model = [batch(1), batch(2)], Stages(F.cross_entropy)
    right = plain_losses(SGD(model.parameters()), batches, model)

    found = rehearse(Stages(F.cross_entropy), None, stages, batches, optimizer=SGD)

    assert found.losses == pytest.approx(right, rel=1e-12)
