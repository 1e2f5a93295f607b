"""Masks that a model draws in its forward, and its own loss that divides by what they count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.errors import InputError

ROWS, TOKENS, WIDTH, KEPT = 8, 6, 4, 2
SGD = partial(torch.optim.SGD, lr=0.1)
Noise = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # of the loss of each token, and a mask


def drawn(x: Tensor) -> Tensor:
    return torch.rand(x.shape[:2])


def computed(x: Tensor) -> Tensor:
    """The same for plain PyTorch, which has other random numbers."""
    return x.sum(2).sin()


ORDERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "argsort": lambda noise: (noise.argsort(1), noise.argsort(1).argsort(1)),
    "sort": lambda noise: (noise.sort(1)[1], noise.sort(1)[1].sort(1)[1].to("cpu")),
}
LOSSES: dict[str, Loss] = {
    "divided": lambda loss, mask: (loss * mask).sum() / mask.sum(),
    "at least one": lambda loss, mask: (loss * mask).sum() / mask.sum().clamp(min=1),
    "a little more": lambda loss, mask: (loss * mask).sum() / (mask.sum() + 1e-6),
    "chosen": lambda loss, mask: loss[mask.bool()].mean(),
    "of a type": lambda loss, mask: (loss * mask).sum() / mask.bool().long().sum(),
    "the others": lambda loss, mask: (loss * (1 - mask)).sum() / (1 - mask).sum(),
}


class Autoencoder(nn.Module):
    def __init__(self, noise: Noise, order: str, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.noise, self.order, self.loss = noise, order, loss
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        shuffle, restore = ORDERS[self.order](self.noise(x))
        kept = x.gather(1, shuffle[:, :KEPT, None].expand(-1, -1, WIDTH))
        mask = torch.ones(x.shape[:2], dtype=x.dtype)
        mask[:, :KEPT] = 0
        mask = torch.gather(mask, dim=1, index=restore)
        hidden = torch.tanh(self.encoder(kept))
        hidden = torch.cat([hidden, self.token.expand(len(x), TOKENS - KEPT, -1)], 1)
        found = self.decoder(hidden.gather(1, restore[:, :, None].expand(-1, -1, WIDTH)))
        return self.loss((found - x).square().mean(-1), mask)


def data(seed: int) -> tuple[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=draw),)


BATCHES = [data(1), data(2)]
FORMS = {f"{one}, {name}": (one, loss) for one in ORDERS for name, loss in LOSSES.items()}


def trained(model: nn.Module, parts: int) -> tuple[float, ...]:
    strategy = [Place(where(), [0]), Split("MB", parts)]
    return tuple(rehearse(model, None, strategy, BATCHES, optimizer=SGD, seed=3).losses)


@pytest.mark.parametrize(("order", "loss"), every(14, FORMS.values(), FORMS))
def test_a_masked_autoencoder_is_the_same_for_any_number_of_microbatches(
    order: str, loss: Loss
) -> None:
    whole, parts = (trained(Autoencoder(drawn, order, loss), n) for n in (1, 4))
    model = Autoencoder(computed, order, loss)
    right = plain_losses(SGD(model.parameters()), BATCHES, model)

    assert parts == pytest.approx(whole, rel=1e-12)
    assert trained(Autoencoder(computed, order, loss), 4) == pytest.approx(right, rel=1e-12)


CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape[:2]) < 0.5,
    "bernoulli": lambda x: torch.bernoulli(torch.full(x.shape[:2], 0.5)) > 0,
    "dropped": lambda x: F.dropout(torch.ones(x.shape[:2])) > 0,
    "an order": lambda x: drawn(x).argsort(1).argsort(1) < (x[:, :1, 0] > 0) * 2,
    "not the same order": lambda x: (x[..., 0] > 0).gather(1, drawn(x).argsort(0) % TOKENS),
    "some of an order": lambda x: (x[..., 0] > 0).gather(1, drawn(x).argsort(1)[:, :3]),
}


class Masked(nn.Module):
    def __init__(self, name: str, loss: Loss) -> None:
        super().__init__()
        self.first, self.name, self.loss = nn.Linear(WIDTH, WIDTH), name, loss
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        mask = CHOSEN[self.name](x)
        apart = (self.first(x) - x).square().mean(-1)[:, : mask.shape[1]]
        return self.loss(apart, mask.double())


class LanguageModel(nn.Module):
    """Draws its own labels, as those of masked language models often do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        labels = torch.where(torch.rand(tokens.shape) < 0.5, tokens, -100)
        return F.cross_entropy(self.last(self.table(tokens)).flatten(0, 1), labels.flatten())


CUT_OFF = (
    r"it is no mean or sum over rows: .* is compared, cut off"  # `clamp(min=1)` is found first
)


@one_of(2)
@pytest.mark.parametrize("name", every(2, CHOSEN))
def test_how_many_a_drawn_mask_chooses_is_not_known_before(name: str) -> None:
    loss = [*LOSSES.values()][len(name) % 5]

    with pytest.raises(InputError, match=f"a mean over a mask that the model draws|{CUT_OFF}"):
        trained(Masked(name, loss), 2)


def test_drawn_labels_are_not_counted() -> None:
    tokens = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 9

    with pytest.raises(InputError, match="a mean over a mask that the model draws"):
        rehearse(LanguageModel(), None, [Place(where(), [0]), Split("MB", 2)], [(tokens,)])
