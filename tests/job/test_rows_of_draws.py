"""Random numbers of a row are the same under every strategy, wherever a tensor has its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import draws, every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, rehearse, where

ROWS, TOKENS, WIDTH, SAMPLES = 8, 4, 6, 2  # tokens are a multiple of the rows of microbatches
SGD = partial(torch.optim.SGD, lr=0.1)
ALONE = [Place(where(), [0])]
STRATEGIES = (
    [*ALONE, Split("MB", 2)],
    [*ALONE, Split("MB", 4)],
    [*ALONE, Split("MB", 8)],
    [Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=2), Split("MB", 2)],
)
Noise = Callable[[Tensor], Tensor]  # of [rows, tokens, width]


def swapped(noise: Noise) -> Noise:
    """With the time first."""
    return lambda h: noise(h.transpose(0, 1)).transpose(0, 1)


def merged(noise: Noise) -> Noise:
    """All rows at the first time, then at the next."""
    return lambda h: (
        noise(h.transpose(0, 1).reshape(-1, WIDTH)).view(TOKENS, -1, WIDTH).transpose(0, 1)
    )


def twice(noise: Noise) -> Noise:
    """Two views of all rows."""
    return lambda h: sum(noise(torch.cat([h, 2 * h])).chunk(2))


def last(noise: Noise) -> Noise:
    return lambda h: noise(h.permute(1, 2, 0).contiguous()).permute(2, 0, 1)


PLACES = {"time first": swapped, "merged": merged, "two views": twice, "last": last}
KINDS: dict[str, Noise] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid().detach()),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "randint": lambda x: x * torch.randint(1, 4, x.shape),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "normal": lambda x: x + torch.distributions.Normal(x, 1.0).rsample(),
}
SIZED: dict[str, Noise] = {
    "samples first": lambda h: (h + torch.randn(SAMPLES, *h.shape)).mean(0),
    "samples last": lambda h: (h[..., None] * torch.rand(*h.shape, SAMPLES)).mean(-1),
    "samples and rows": lambda h: (
        h.repeat(SAMPLES, 1, 1) * torch.rand(SAMPLES * len(h), TOKENS, 1)
    ).view(SAMPLES, *h.shape).mean(0),
    "rows and samples": lambda h: (
        h.repeat_interleave(SAMPLES, 0) * torch.rand(SAMPLES * len(h), TOKENS, 1)
    ).view(len(h), SAMPLES, TOKENS, WIDTH).mean(1),
    "expanded": lambda h: F.dropout(
        h.expand(SAMPLES, *h.shape).flatten(0, 1), 0.3
    ).unflatten(0, (SAMPLES, -1)).mean(0),
    "halves": lambda h: h + sum(torch.randn(2 * len(h), 1, WIDTH).chunk(2)),
    "the first half": lambda h: h + torch.randn(2 * len(h), 1, WIDTH)[: len(h)],
    "every second": lambda h: h + torch.randn(2 * len(h), 1, WIDTH)[::2],
    "beside tokens": lambda h: h * torch.rand(TOKENS, len(h)).t()[..., None],
    "behind tokens": lambda h: h + torch.randn(TOKENS * len(h)).view(TOKENS, -1).t()[..., None],
    "before tokens": lambda h: h + torch.randn(TOKENS * len(h)).view(-1, TOKENS)[..., None],
    "heads": lambda h: torch.cat(F.dropout(torch.cat(h.chunk(2, -1)), 0.3).chunk(2), -1),
    "heads of rows": lambda h: F.dropout(
        h.view(-1, TOKENS, 2, 3).transpose(1, 2).reshape(-1, TOKENS, 3), 0.3
    ).view(-1, 2, TOKENS, 3).transpose(1, 2).reshape(h.shape),
    "channels": lambda h: F.dropout2d(h.transpose(0, 1)[..., None], 0.4)[..., 0].transpose(0, 1),
    "channels of all rows": lambda h: F.dropout1d(h.permute(1, 2, 0), 0.4).permute(2, 0, 1),
    "categories": lambda h: h
    * (1 + torch.multinomial(h.transpose(0, 1).flatten(0, 1).exp(), 2).sum(-1))
    .view(TOKENS, -1).t()[..., None],
    "one by one": lambda h: torch.stack([row * torch.rand(TOKENS, 1) for row in h]),
    "one by one, twice": lambda h: torch.stack(
        [F.dropout(F.dropout(row, 0.3) + torch.rand(1) * torch.rand(1), 0.2) for row in h]
    ),
    "one by one, in turns": lambda h: torch.stack(
        [F.dropout(one, 0.3) for one in [F.dropout(row, 0.4) for row in h]]
    ),
    "one by one, from behind": lambda h: torch.stack(
        [F.dropout(row, 0.4) for row in h.unbind()[::-1]][::-1]
    ),
    "one by one, by number": lambda h: torch.cat(
        [F.dropout(h[k : k + 1], 0.4) * torch.rand(1) for k in range(len(h))]
    ),
    "one by one, before them": lambda h: h + torch.stack([torch.rand(TOKENS, 1) for _ in h]),
    "one by one, dropped": lambda h: torch.stack([F.dropout(row, 0.4) for row in h]),
    "pairs": lambda h: h + torch.rand(len(h) // 2, 1, 1).repeat_interleave(2, 0),
}  # fmt: skip
FORMS = {f"{a}, {b}": PLACES[a](noise) for a in PLACES for b, noise in KINDS.items()} | SIZED
WHOLE = {"pairs"}  # of rows: a microbatch of one row has none


class Net(nn.Module):
    def __init__(self, noise: Noise) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.noise = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), noise
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.noise(torch.tanh(self.first(x)))
        return self.last(F.dropout(hidden, 0.2))  # numbers of a later draw are the same, too


def data(tokens: int = TOKENS) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(1)
    shape = 2, ROWS, tokens, WIDTH
    return [tuple(torch.randn(shape, generator=draw, dtype=torch.float64)) for _ in range(2)]


def assert_independent_of_strategy(
    model: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture, count: int = 4
) -> None:
    batches = data()
    with caplog.at_level(logging.WARNING, "piper"):
        alone = rehearse(model(), F.mse_loss, ALONE, batches, optimizer=SGD)
        for strategy in STRATEGIES[draws(-1, 0) :] if count == 4 else STRATEGIES[:count]:
            found = rehearse(model(), F.mse_loss, strategy, batches, optimizer=SGD)

            assert found.losses == pytest.approx(alone.losses, rel=1e-12)
            for name, tensor in found.parameters.items():
                torch.testing.assert_close(tensor, alone.parameters[name], rtol=1e-9, atol=1e-12)
    assert not caplog.messages


def together(noises: list[Noise]) -> Noise:
    return lambda h: torch.stack([noise(h) for noise in noises]).mean(0)


GROUPS = {
    f"{name}, {part}": together([place(noise) for noise in list(KINDS.values())[part::3]])
    for name, place in PLACES.items()
    for part in range(3)
}  # by default, each kind at one of the places
LOOPS = [name for name in FORMS if "one by one" in name][::4]
ONE_BY_ONE = [pytest.param(name, marks=() if name in LOOPS else pytest.mark.soak) for name in FORMS]


@one_of(2)
@pytest.mark.parametrize("noise", every(4, GROUPS.values(), GROUPS))
def test_numbers_of_rows_are_the_same_under_every_strategy(
    noise: Noise, caplog: pytest.LogCaptureFixture
) -> None:
    assert_independent_of_strategy(lambda: Net(noise), caplog)


@one_of(2)
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_numbers_of_one_form_are_the_same_under_every_strategy(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    count = 2 if name in WHOLE else 4
    assert_independent_of_strategy(lambda: Net(FORMS[name]), caplog, count)


class Sequences(nn.Module):
    """A layer of torch that takes time first."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), make()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).transpose(0, 1)
        times = {nn.MultiheadAttention: 3, nn.TransformerDecoderLayer: 2}.get(type(self.layer), 1)
        found = self.layer(*[h] * times)
        return (found[0] if isinstance(found, tuple) else found).transpose(0, 1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.3),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, 0.3),
    "decoder": lambda: nn.TransformerDecoderLayer(WIDTH, 3, 8, 0.3),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, 3, dropout=0.3),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", every(5, LAYERS))
def test_layers_of_torch_that_take_time_first_draw_the_same_numbers(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_independent_of_strategy(lambda: Sequences(LAYERS[name]), caplog)


UNCLEAR: dict[str, Noise] = {
    "one more": lambda h: h + torch.randn(len(h) + 1, 1, WIDTH)[1:],
    "two for each row, before a loop": lambda h: (
        h + torch.stack([torch.rand(1) + torch.rand(1) for _ in h])[:, None]
    ),
    "in code without a file": eval("lambda h: h + torch.randn(len(h) + 1, 1, WIDTH)[1:]"),
    "like those chosen": lambda h: h.masked_scatter(
        (chosen := h[..., 0] > 0)[..., None], torch.rand_like(h[chosen])
    ),
    "chosen": lambda h: h.masked_scatter(
        (chosen := h[..., 0] > 0)[..., None], F.dropout(h[chosen], 0.3)
    ),
}


@one_of(2)
@pytest.mark.parametrize("name", every(2, UNCLEAR))
def test_numbers_of_unclear_rows_get_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Net(UNCLEAR[name]), F.mse_loss, STRATEGIES[0], data(), optimizer=SGD)

    assert any("belong to which rows of the batch" in one for one in caplog.messages)


def test_one_microbatch_needs_no_rows_of_draws(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        rehearse(Net(UNCLEAR["one more"]), F.mse_loss, ALONE, data(), optimizer=SGD)

    assert not caplog.messages
