"""Losses by torch.distributions, of outputs that the model makes valid: random ones are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from piper import rehearse
from piper.strategies import gpipe

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def positive(h: Tensor) -> Tensor:
    return F.softplus(h) + 1e-3


def two(h: Tensor) -> tuple[Tensor, Tensor]:
    return h[:, :3], positive(h[:, 3:])


LOSSES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "Normal": (two, lambda o, y: -distributions.Normal(*o).log_prob(y).mean()),
    "Laplace": (two, lambda o, y: -distributions.Laplace(*o).log_prob(y).mean()),
    "StudentT": (two, lambda o, y: -distributions.StudentT(3.0, *o).log_prob(y).mean()),
    "Independent": (
        two,
        lambda o, y: -distributions.Independent(distributions.Normal(*o), 1).log_prob(y).mean(),
    ),
    "Categorical": (
        lambda h: h.softmax(-1),
        lambda o, y: -distributions.Categorical(probs=o).log_prob((y[:, 0] > 0).long()).mean(),
    ),
    "Poisson": (
        positive,
        lambda o, y: -distributions.Poisson(o[:, :3]).log_prob(y.abs().round()).mean(),
    ),
    "divergence": (
        two,
        lambda o, y: distributions.kl_divergence(
            distributions.Normal(*o), distributions.Normal(y, torch.ones_like(y))
        ).mean(),
    ),
}


class Net(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.form = nn.Linear(8, 6).double(), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x))


@one_of(4)
@pytest.mark.parametrize("name", LOSSES)
def test_they_train_as_in_plain_pytorch(name: str) -> None:
    form, loss_fn = LOSSES[name]
    draw = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 8, generator=draw).double(), torch.randn(8, 3, generator=draw).double())
        for _ in range(3)
    ]
    model = Net(form)
    losses = plain_losses(SGD(model.parameters()), batches, lambda x, y: loss_fn(model(x), y))

    strategy = gpipe(pp=1, dp=2, zero=2, microbatches=2)
    found = rehearse(Net(form), loss_fn, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    wanted = dict(model.named_parameters())
    torch.testing.assert_close(found.parameters["layer.weight"], wanted["layer.weight"].detach())
