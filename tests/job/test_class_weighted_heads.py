"""Class weights in several heads, and microbatches and replicas whose labels weigh nothing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn

from piper import rehearse
from piper.errors import InputError
from piper.strategies import gpipe, one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STRATEGIES = {"microbatches": gpipe(1, 4), "dp": gpipe(1, 2, dp=2, zero=2), "pp": one_f_one_b(2, 4)}


class Heads(nn.Module):
    """With a loss of its own, if it is given labels."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two = (nn.Linear(4, n).double() for n in (4, 5, 5))
        self.loss = nn.CrossEntropyLoss(weight=weights)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.body(x).tanh()
        outputs = self.one(h), self.two(h)
        return outputs if y is None else both(self.loss, outputs, y)


def both(loss: nn.Module, outputs: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    found: Tensor = loss(outputs[0], y) + 0.4 * loss(outputs[1], y)
    return found


def batches(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Three batches of eight rows, whose labels all count, or only those of some rows."""
    draw, found = torch.Generator().manual_seed(1), []
    for k in range(3):
        x, y = torch.randn(8, 4, generator=draw), torch.randint(1, 5, (8,), generator=draw)
        start = 4 * (k % 2)
        if kind != "all":
            y[start : start + 4] = -100 if kind == "ignored" else 0
        found.append((x.double(), y))
    return found


@one_of(6)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["all", "ignored"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_plain_training(strategy: str, kind: str, own: bool) -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.7, 2.0], dtype=torch.float64)
    model, given = Heads(weights), batches(kind)
    plain, wanted = copy.deepcopy(model), []
    optimizer = SGD(plain.parameters())
    for x, y in given:
        optimizer.zero_grad()
        loss = both(plain.loss, plain(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())

    loss_fn = None if own else partial(both, nn.CrossEntropyLoss(weight=weights.clone()))
    found = rehearse(model, loss_fn, STRATEGIES[strategy], given, optimizer=SGD)

    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-11, atol=0)


def test_labels_of_no_weight_alone_are_refused() -> None:
    """Their gradients are 0 / 0 in PyTorch, too."""
    weights = torch.tensor([0.0, 1.0, 3.0, 0.7, 2.0], dtype=torch.float64)

    with pytest.raises(InputError, match="microbatch 0 has weight 0"):
        rehearse(Heads(weights), None, gpipe(1, 2), batches("class of no weight"))


def test_a_batch_without_any_label_that_counts_is_refused() -> None:
    x, y = batches("all")[0]

    with pytest.raises(InputError, match="weight 0"):
        rehearse(Heads(torch.ones(5).double()), None, gpipe(1, 2, dp=2), [(x, y), (x, y * 0 - 100)])
