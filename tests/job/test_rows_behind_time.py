"""Models whose outputs have rows behind time, as speech models and recurrent layers return them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, annotate, rehearse, where
from piper.errors import InputError

ROWS, PARTS, WIDTH, CLASSES = 8, 4, 6, 5
SGD = partial(torch.optim.SGD, lr=0.1)
STAGES = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Split("MB", PARTS)]
Labels = tuple[Tensor, ...]  # texts, lengths of inputs and of texts, a class for each step
Loss = Callable[[Tensor, Labels], Tensor]


class Speech(nn.Module):
    """Log-probabilities [time, rows, classes] of inputs [rows, time, width]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            hidden = torch.tanh(self.encoder(x))
        with annotate("PP"):
            return self.head(hidden).log_softmax(-1).transpose(0, 1)


class Recurrent(Speech):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            hidden = torch.tanh(self.encoder(x))
        with annotate("PP"):
            return self.head(self.memory(hidden.transpose(0, 1))[0]).log_softmax(-1)


def tokens(output: Tensor, labels: Labels) -> Tensor:
    """All elements one after the other, with those of each time together."""
    return F.nll_loss(output.flatten(0, 1), labels[3].t().flatten())


RIGHT: dict[str, Loss] = {
    "ctc": lambda o, y: F.ctc_loss(o, *y[:3]),
    "ctc of rows": lambda o, y: F.ctc_loss(o, *y[:3], reduction="none").mean(),
    "ctc, summed": lambda o, y: F.ctc_loss(o, *y[:3], reduction="sum"),
    "classes of rows": lambda o, y: F.nll_loss(o.permute(1, 2, 0), y[3]),
    "classes of tokens": lambda o, y: F.nll_loss(o.transpose(0, 1).flatten(0, 1), y[3].flatten()),
    "classes of times": tokens,
    "sums over time": lambda o, y: o.square().sum(0).mean(),
    "sums over rows": lambda o, y: o.square().sum(1).mean(),
    "the last time": lambda o, y: F.nll_loss(o[-1], y[3][:, -1]),
}
WRONG: dict[str, Loss] = {
    "a root": lambda o, y: o.square().mean().sqrt(),
    "the worst row": lambda o, y: o.square().amax(1).mean(),
    "over rows": lambda o, y: F.nll_loss(o.softmax(1).flatten(0, 1), y[3].t().flatten()),
}


def batch(seed: int, time: int) -> tuple[Tensor, Labels]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, time, WIDTH, dtype=torch.float64, generator=draw)
    texts = torch.randint(1, CLASSES, (ROWS, 1), generator=draw)
    classes = torch.randint(0, CLASSES, (ROWS, time), generator=draw)
    return x, (texts, torch.full((ROWS,), time), torch.ones(ROWS, dtype=torch.int64), classes)


TIMES = [3, 4, 2]  # no multiple of a microbatch's rows, a multiple, and as many by chance
FORMS = {f"{name}, {time}": (loss, time) for name, loss in RIGHT.items() for time in TIMES}


@one_of(2)
@pytest.mark.parametrize(("loss", "time"), every(13, FORMS.values(), FORMS))
def test_losses_of_rows_behind_time_are_those_of_the_whole_batch(loss: Loss, time: int) -> None:
    batches = [batch(1, time), batch(2, time)]
    model = Speech()
    right = plain_losses(SGD(model.parameters()), batches, lambda x, y: loss(model(x), y))

    found = rehearse(Speech(), loss, STAGES, batches, optimizer=SGD)

    assert found.losses == pytest.approx(right, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-10, atol=0)


@pytest.mark.soak
def test_a_recurrent_model_trains_with_ctc() -> None:
    batches: list[Any] = [batch(1, 3), batch(2, 3)]
    model, loss = Recurrent(), RIGHT["ctc"]
    right = plain_losses(SGD(model.parameters()), batches, lambda x, y: loss(model(x), y))

    found = rehearse(Recurrent(), loss, STAGES, batches, optimizer=SGD)

    assert found.losses == pytest.approx(right, rel=1e-12)


@one_of(2)
@pytest.mark.parametrize("time", every(3, TIMES))
@pytest.mark.parametrize("loss", every(1, WRONG.values(), WRONG))
def test_what_is_no_mean_over_rows_behind_time_is_refused(loss: Loss, time: int) -> None:
    with pytest.raises(InputError, match="microbatches would not add up"):
        rehearse(Speech(), loss, STAGES, [batch(1, time)], optimizer=SGD)
