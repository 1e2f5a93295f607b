"""Models that have tokens first: rows behind tokens in one dimension are still rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
from draws import every, levels_of, one_of
from torch import Tensor, nn
from torch.nn import functional as F
from trained_as_plain import assert_trains_as_plain

from piper import Place, Replicate, Split, Strategy, rehearse, where
from piper.capture.loss import LossForm, own_form
from piper.capture.trace.arguments.inputs import inputs_of
from piper.errors import InputError

ROWS, LENGTH, WIDTH, WORDS = 8, 6, 8, 7
SGD = partial(torch.optim.SGD, lr=0.1)
STRATEGIES = [
    Strategy([Place(where(), [0]), Split("MB", 4)]),
    Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=1), Split("MB", 2)]),
]
Loss = Callable[["Model", Tensor, Tensor], Tensor]  # of hidden tokens, and labels


def attended(model: Model, h: Tensor, y: Tensor) -> Tensor:
    mixed, _ = model.attention(h, h, h, key_padding_mask=y == -100)
    return tokens(model, h + mixed, y)


def tokens(model: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.head(h).flatten(0, 1), y.flatten())


def tokens_first(model: Model, h: Tensor, y: Tensor) -> Tensor:
    flat = model.norm(h.transpose(0, 1).reshape(-1, WIDTH))
    return F.cross_entropy(model.head(torch.relu(flat) + 0.1 * flat), y.T.reshape(-1))


def there_and_back(model: Model, h: Tensor, y: Tensor) -> Tensor:
    flat = model.head(h.transpose(0, 1).reshape(-1, WIDTH)).log_softmax(-1)
    return F.nll_loss(flat.view(LENGTH, -1, WORDS).permute(1, 2, 0), y)


def means(model: Model, h: Tensor, y: Tensor) -> Tensor:
    flat = h.transpose(0, 1).reshape(-1, WIDTH)
    return flat.square().mean() + flat.sum(1).abs().sum() / len(h)


def heads(model: Model, h: Tensor, y: Tensor) -> Tensor:
    """As in attention, where rows and heads are one dimension, and then rows and tokens."""
    own = h.transpose(0, 1).reshape(LENGTH, -1, WIDTH // 2).transpose(0, 1)
    mixed = (own @ own.mT).softmax(-1) @ own
    flat = mixed.transpose(0, 1).reshape(-1, WIDTH)
    return tokens(model, model.norm(flat).view(LENGTH, -1, WIDTH).transpose(0, 1), y)


PROVED: dict[str, Loss] = {
    "attention": attended,
    "tokens first": tokens_first,
    "there and back": there_and_back,
    "means": means,
    "heads": heads,
}


def mispaired(model: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.head(h.transpose(0, 1).reshape(-1, WIDTH)), y.flatten())


def torn(model: Model, h: Tensor, y: Tensor) -> Tensor:
    flat = h.transpose(0, 1).reshape(-1, WIDTH)
    return tokens(model, flat.view(-1, LENGTH, WIDTH), y)


def first_of_all(model: Model, h: Tensor, y: Tensor) -> Tensor:
    return h.flatten()[torch.arange(len(h))].square().mean()


def other_groups(model: Model, h: Tensor, y: Tensor) -> Tensor:
    flat = h.transpose(0, 1).reshape(-1, WIDTH)
    thirds = h.unflatten(1, (3, 2)).transpose(0, 1).reshape(-1, WIDTH)
    return (flat * thirds).mean()


MEETING: dict[str, Loss] = {
    "other labels": mispaired,
    "torn apart": torn,
    "the first of all": first_of_all,
    "other groups": other_groups,
}


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.loss = nn.LayerNorm(WIDTH), loss
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.embed(x)), y)


def data(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, WORDS, (2, rows, LENGTH), generator=draw)
    ignored = torch.rand(rows, LENGTH, generator=draw) < 0.3
    return x, torch.where(ignored & (torch.arange(LENGTH) > 0), -100, y)


def form(loss: Loss, rows: int) -> LossForm:
    return own_form(Model(loss), inputs_of(data(1, rows)), "cpu", None, LossForm())


@one_of(2)
@pytest.mark.parametrize(("name", "rows"), levels_of(PROVED, [1, 2, 3]))
def test_tokens_first_is_proved(name: str, rows: int) -> None:
    assert form(PROVED[name], rows).kind == "mean"


@one_of(2)
@pytest.mark.parametrize("name", MEETING)
def test_rows_that_are_not_where_they_were_are_seen(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In its graph, or else in a trial."""
    with caplog.at_level(logging.WARNING, "piper"), suppress(InputError):
        rehearse(Model(MEETING[name]), None, STRATEGIES[0], [data(1)], optimizer=SGD)
        assert "rows of the batch meet" in caplog.text


WAYS = [(name, one) for name in PROVED for one in STRATEGIES]


@one_of(2)
@pytest.mark.parametrize(("name", "strategy"), every(3, WAYS))
def test_models_with_tokens_first_train_as_in_plain_pytorch(name: str, strategy: Strategy) -> None:
    make, batches = partial(Model, PROVED[name]), [data(seed) for seed in range(3)]

    assert_trains_as_plain(make, strategy, batches, SGD)
