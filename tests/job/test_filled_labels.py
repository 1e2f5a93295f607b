"""Labels that a loss fills itself, and counts that a loop adds up, are seen in its graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, rehearse, where

ROWS, WIDTH, CLASSES = 8, 4, 3
SGD = partial(torch.optim.SGD, lr=0.1)
STRATEGIES = (
    [Place(where(), [0]), Split("MB", 4)],
    [Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)],
)
Loss = Callable[[Tensor, Tensor], Tensor]


def ordinal(scores: Tensor, labels: Tensor) -> Tensor:
    """CORN: a binary loss for each class, of the rows that reached it."""
    loss, count = 0, 0
    for k in range(CLASSES):
        reached, above = (labels > k - 1).to(scores.dtype), (labels > k).to(scores.dtype)
        each = F.binary_cross_entropy_with_logits(scores[:, k], above, reduction="none")
        loss, count = loss + (each * reached).sum(), count + reached.sum()
    return loss / count


def negative(scores: Tensor, labels: Tensor) -> Tensor:
    total, count = 0.0, 0.0
    for k in range(CLASSES):
        mask = labels == k
        total = total - (scores.log_softmax(1)[:, k] * mask).sum()
        count = count + mask.sum()
    return total / count


LOSSES: dict[str, Loss] = {
    "new_zeros": lambda s, y: F.cross_entropy(s, s.new_zeros(len(s), dtype=torch.long)),
    "new_ones": lambda s, y: F.cross_entropy(s, s.new_ones(len(s), dtype=torch.long)),
    "new_full": lambda s, y: F.cross_entropy(s, s.new_full((len(s),), 2, dtype=torch.long)),
    "zeros_like": lambda s, y: F.cross_entropy(s, torch.zeros_like(s[:, 0], dtype=torch.long)),
    "ones_like": lambda s, y: F.nll_loss(
        s.log_softmax(1), torch.ones_like(s[:, 0], dtype=torch.long)
    ),
    "full_like": lambda s, y: F.cross_entropy(s, torch.full_like(s[:, 1], 1, dtype=torch.long)),
    "beside others": lambda s, y: (
        F.cross_entropy(s, y) + F.cross_entropy(-s, s.new_zeros(len(s), dtype=torch.long))
    ),
    "real and not": lambda s, y: (
        F.binary_cross_entropy_with_logits(s, s.new_ones(s.shape))
        + F.binary_cross_entropy_with_logits(-s, torch.zeros_like(s))
    ),
    "ordinal": ordinal,
    "negative": negative,
}


class Own(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(WIDTH, CLASSES), loss
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layer(x), labels)


def data(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=draw)


FORMS = {f"{name}, {own}": (name, own) for name in LOSSES for own in (True, False)}


@one_of(4)
@pytest.mark.parametrize(("name", "own"), every(3, FORMS.values(), FORMS))
def test_losses_with_labels_of_their_own_train_as_plain_pytorch_does(name: str, own: bool) -> None:
    loss, batches = LOSSES[name], [data(1), data(2)]
    model = Own(loss)
    right = plain_losses(SGD(model.parameters()), batches, model)

    for strategy in STRATEGIES:
        made = Own(loss)
        given = (made, None) if own else (made.layer, loss)
        found = rehearse(*given, strategy, batches, optimizer=SGD)

        assert found.losses == pytest.approx(right, rel=1e-12)
