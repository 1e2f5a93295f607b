"""Losses that divide by a count and a small number: trials round it as the loss does."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.trace.replaced.calls import ReplacedCalls

CLASSES, LENGTH = 4, 5
DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "of integers": lambda mask, eps: mask.sum() + eps,
    "of floats": lambda mask, eps: mask.float().sum() + eps,
    "of doubles": lambda mask, eps: mask.double().sum() + eps,
    "of rounded floats": lambda mask, eps: mask.bfloat16().sum() + eps,
    "at least": lambda mask, eps: mask.float().sum().clamp(min=eps),
    "both": lambda mask, eps: (mask.sum() + eps).clamp(min=1.0),
}
SMALL = [1e-8, 1e-12, 1e-6, 1e-3, 1.0]
CASES = list(itertools.product(SMALL, DIVISORS))


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(8, LENGTH, CLASSES, dtype=torch.float64, generator=draw),
            torch.randint(0, CLASSES, (8, LENGTH), generator=draw),
        )
        for _ in range(2)
    ]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(CLASSES, CLASSES).double()


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)  # type: ignore[arg-type]


def compare(loss_fn: Callable[[Tensor, Tensor], Tensor], parts: int) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = plain_losses(optimizer, batches(), lambda x, y: loss_fn(plain(x), y))

    strategy = [Place(where(), [0]), Split("MB", parts)]
    found = rehearse(model(), loss_fn, strategy, batches(), optimizer=sgd)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, one in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], one.detach(), rtol=1e-12, atol=1e-13)


@one_of(2)
@pytest.mark.parametrize(("eps", "name"), every(13, CASES))
def test_masked_means_train_as_on_the_whole_batch(eps: float, name: str) -> None:
    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(output.mT, labels, reduction="none")
        return (each * (labels > 0)).sum() / DIVISORS[name](labels > 0, eps)

    compare(loss_fn, 2)


def test_classes_may_be_weighed_by_their_counts() -> None:
    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        counts = torch.bincount(labels.flatten(), minlength=CLASSES)
        return F.cross_entropy(output.mT, labels, weight=1 / (counts.double() + 1))

    compare(loss_fn, 1)


def test_counts_are_those_of_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(0, 6, (20,), generator=draw)
    for kind in (torch.int64, torch.int32, torch.uint8):
        for like in (None, torch.float32, torch.float64, torch.float16, torch.int64):
            weights = None if like is None else torch.randn(20, generator=draw).mul(8).to(like)
            right = torch.bincount(values.to(kind), weights, 6)
            with ReplacedCalls():
                found = torch.bincount(values.to(kind), weights, minlength=6)

            torch.testing.assert_close(found, right)
