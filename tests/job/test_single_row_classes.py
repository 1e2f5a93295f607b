"""Losses that average classes, where a microbatch is one row: two rows alone show nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import PiperError

CLASSES, WIDTH = 4, 5
Loss = Callable[[Tensor, Tensor], Tensor]


def by_pairs(out: Tensor, y: Tensor) -> Tensor:
    weight = 1.0 / (y[:, None] == y[None]).sum(1)
    return (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()


def in_a_loop(out: Tensor, y: Tensor) -> Tensor:
    found = [F.cross_entropy(out[y == k], y[y == k]) for k in y.unique().tolist()]
    return torch.stack(found).mean()


def by_counts(out: Tensor, y: Tensor) -> Tensor:
    weight = 1.0 / torch.bincount(y, minlength=CLASSES)[y]
    return (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()


def by_hot_rows(out: Tensor, y: Tensor) -> Tensor:
    hot = F.one_hot(y, CLASSES).to(out)
    each = hot.T @ F.cross_entropy(out, y, reduction="none")
    return (each / hot.sum(0).clamp(min=1)).sum() / (hot.sum(0) > 0).sum()


def by_scatter(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y, reduction="none")
    each = torch.zeros(CLASSES, dtype=out.dtype).scatter_reduce(
        0, y, loss, "mean", include_self=False
    )
    return each.sum() / torch.zeros(CLASSES).scatter(0, y, 1.0).sum()


def over_present(out: Tensor, y: Tensor) -> Tensor:
    loss, zeros = F.cross_entropy(out, y, reduction="none"), out.new_zeros(CLASSES)
    total, count = zeros.index_add(0, y, loss), zeros.index_add(0, y, torch.ones_like(loss))
    return (total[count > 0] / count[count > 0]).mean()


def over_unique(out: Tensor, y: Tensor) -> Tensor:
    _, inverse, counts = y.unique(return_inverse=True, return_counts=True)
    loss = F.cross_entropy(out, y, reduction="none")
    return torch.zeros(len(counts)).to(out).index_add(0, inverse, loss / counts[inverse]).mean()


def over_masks(out: Tensor, y: Tensor) -> Tensor:
    loss, hot = F.cross_entropy(out, y, reduction="none"), F.one_hot(y, CLASSES).to(out)
    count = hot.sum(0)
    return ((hot * loss[:, None]).sum(0) / count.clamp(min=1)).sum() / count.clamp(max=1).sum()


def by_any(out: Tensor, y: Tensor) -> Tensor:
    found = [F.cross_entropy(out[y == k], y[y == k]) for k in range(CLASSES) if (y == k).any()]
    return sum(found, start=out.new_zeros(())) / len(found)


def by_where(out: Tensor, y: Tensor) -> Tensor:
    hot, loss = F.one_hot(y, CLASSES), F.cross_entropy(out, y, reduction="none")
    count = hot.sum(0)
    each = torch.where(count > 0, (hot * loss[:, None]).sum(0) / count.clamp(min=1), 0.0)
    return each.sum() / (count > 0).sum()


LOSSES: list[Loss] = [
    over_present,
    over_unique,
    over_masks,
    by_any,
    by_where,
    by_pairs,
    in_a_loop,
    by_counts,
    by_hot_rows,
    by_scatter,
]


class OwnLoss(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layers(x), y)


@one_of(4)
@pytest.mark.parametrize("labels", [[0, 0, 1, 3], [3, 3, 3, 1]])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda one: one.__name__)
def test_classes_that_are_averaged_are_refused_or_warned_of(
    loss: Loss, is_own: bool, labels: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model, y = OwnLoss(loss), torch.tensor(labels)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = (model, None) if is_own else (model.layers, loss)
    strategy = [Place(where(), [0]), Split("MB", 4)]
    whole = loss(model.layers(x), y)
    alone = [loss(model.layers(a), b) for a, b in zip(x.split(1), y.split(1), strict=True)]
    assert not torch.allclose(whole, torch.stack(alone).mean())
    try:
        rehearse(*given, strategy, [(x, y)], optimizer=partial(torch.optim.SGD, lr=0.1))
    except PiperError as error:
        assert "fix:" in str(error)
    else:
        assert "one microbatch and one replica" in caplog.text
