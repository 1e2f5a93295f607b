"""Losses whose terms divide by multiples of one count: they have one weight for each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, strategies, where
from piper.errors import InputError

CLASSES = 4
SGD = partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[Tensor, Tensor], Tensor]


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """As the label smoother of Hugging Face."""
    log_probs, labels = -F.log_softmax(logits, -1), labels.unsqueeze(-1)
    padding = labels.eq(-100)
    each = log_probs.gather(-1, labels.clamp(min=0)).masked_fill(padding, 0.0)
    every = log_probs.sum(-1, keepdim=True).masked_fill(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * each.sum() / active + 0.1 * every.sum() / (active * logits.shape[-1])


def regularised(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    each = F.cross_entropy(logits, labels, reduction="none")
    return each.sum() / mask.sum() + (logits.logsumexp(-1) ** 2 * mask).sum() / (mask.sum() * 3)


def halved(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).double()
    each = F.cross_entropy(logits, labels, reduction="none")
    return each.sum() / mask.sum() + each.square().sum() / (mask.sum() / 2)


def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    each = F.cross_entropy(logits, labels, reduction="none")
    return each.sum() / mask.sum() + each.sum() / (mask.sum() * len(labels))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, CLASSES).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (8,), generator=draw)
    labels[2 * seed + 1 : 2 * seed + 2] = -100
    return torch.randn(8, 6, dtype=torch.float64, generator=draw), labels


PARTS = {
    "microbatches": [Place(where(), [0]), Split("MB", 2)],
    "replicas": strategies.one_f_one_b(pp=1, dp=2, microbatches=2),
}


@one_of(6)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("loss", [smoothed, regularised, halved], ids=lambda one: one.__name__)
def test_multiples_of_a_count_train_as_in_plain_pytorch(loss: Loss, parts: str) -> None:
    plain, batches = model(), [batch(seed) for seed in range(3)]
    wanted = plain_losses(SGD(plain.parameters()), batches, lambda x, y: loss(plain(x), y))

    found = rehearse(model(), loss, PARTS[parts], batches, optimizer=SGD)

    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-10, atol=0)


def test_a_multiple_that_follows_the_rows_is_refused() -> None:
    with pytest.raises(InputError, match="would not add up"):
        rehearse(model(), of_rows, PARTS["microbatches"], [batch(0)], optimizer=SGD)
