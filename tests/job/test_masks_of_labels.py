"""Means over labels that a mask chooses, made in other words than `==`. Later batches have labels
that the first one had not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import InputError
from piper.job.loss import trial_size

SGD = partial(torch.optim.SGD, lr=0.1)
KNOWN = torch.tensor([True] * 7 + [False])
LIMITS = torch.tensor([2, 6])
Mask = Callable[[Tensor], Tensor]
MASKS: dict[str, Mask] = {
    "isin": lambda y: ~torch.isin(y, torch.tensor([7])),
    "inverted": lambda y: torch.isin(y, torch.tensor([7]), invert=True),
    "bucketize": lambda y: torch.bucketize(y, LIMITS) < 2,
    "searchsorted": lambda y: torch.searchsorted(LIMITS, y) < 2,
    "take": lambda y: KNOWN.take(y),
}


def loss_of(mask: Mask) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none")[mask(y)].mean()

    return loss


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for k in range(2):
        labels = torch.tensor([0, 1, 2, 0, 2, 1, 0, 1])
        labels[1] = 7 if k else 1
        found.append((torch.randn(8, 6, dtype=torch.float64, generator=draw), labels))
    return found


@pytest.fixture(params=[False, True], ids=["small", "large"], autouse=True)
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(trial_size, "LIMIT", 0)


def trained(model: nn.Module, mask: Mask) -> tuple[float, ...]:
    strategy = [Place(where(), [0]), Split("MB", 2)]
    return rehearse(model, loss_of(mask), strategy, batches(), optimizer=SGD).losses


@one_of(9)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_in_any_words_are_counted(mask: Mask) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 8).double()
    plain, loss = copy.deepcopy(model), loss_of(mask)
    wanted = plain_losses(SGD(plain.parameters()), batches(), lambda x, y: loss(plain(x), y))

    assert trained(model, mask) == pytest.approx(wanted, rel=1e-12)


@one_of(2)
def test_a_mask_that_nothing_proves_is_refused() -> None:
    def mask(y: Tensor) -> Tensor:
        return torch.cdist(y[:, None].double(), torch.tensor([[7.0]]).double())[:, 0] > 0

    with pytest.raises(InputError, match="would not add up"):
        trained(nn.Linear(6, 8).double(), mask)
