"""The CTC loss of models with time first, as those of speech and text in images."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, where
from piper.capture.kernels.ctc import refuse_no_class

SGD = partial(torch.optim.SGD, lr=0.1)
TIME, CLASSES = 9, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x.transpose(0, 1))))
        return found.log_softmax(-1)


def mean(o: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    return F.ctc_loss(o, y[0], torch.full((o.shape[1],), o.shape[0]), y[1])


def divided(o: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
    each = F.ctc_loss(o, y[0], torch.full((o.shape[1],), o.shape[0]), y[1], reduction="none")
    return (each / y[1].clamp(min=1)).mean()


def batches() -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """What pads a row of targets is no class. The second batch is ragged."""
    draw, found = torch.Generator().manual_seed(1), []
    for rows in (6, 7, 6):
        lengths = torch.randint(1, 4, (rows,), generator=draw)
        targets = torch.randint(1, CLASSES, (rows, 3), generator=draw)
        targets[torch.arange(3) >= lengths[:, None]] = -1
        x = torch.randn(rows, TIME, 4, generator=draw).double()
        found.append((x, (targets, lengths)))
    return found


@pytest.mark.parametrize("loss_fn", [mean, divided])
def test_they_train_as_in_plain_pytorch(loss_fn: Any) -> None:
    strategy, model = [Place(where(), [0]), Split("MB", 3)], Net()
    with Trainer(Net(), loss_fn, strategy, example=batches()[0], optimizer=SGD) as trainer:
        found = [float(trainer.step(*one).loss) for one in batches()]
    wanted = plain_losses(SGD(model.parameters()), batches(), lambda x, y: loss_fn(model(x), y))

    assert found == pytest.approx(wanted, rel=1e-10)


def test_a_target_that_is_no_class_is_an_error() -> None:
    """torch reads memory that is none of the loss's."""
    lengths, padded = torch.tensor([1, 2]), torch.tensor([[1, -1], [2, 3]])

    refuse_no_class(padded, lengths, CLASSES)
    for wrong in (torch.tensor([[1, 0], [2, -1]]), torch.tensor([1, 2, CLASSES])):
        with pytest.raises(IndexError, match="is out of bounds for 5 classes"):
            refuse_no_class(wrong, lengths, CLASSES)
