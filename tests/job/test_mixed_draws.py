"""Rows that meet only where random numbers differ: a trial draws on both sides of a threshold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where

ROWS, TOKENS, WIDTH = 8, 6, 4
SGD = partial(torch.optim.SGD, lr=0.1)
Mix = Callable[[Tensor], Tensor]
Chosen = Callable[[Tensor, Tensor], Tensor]  # of rows, and a mask of some of them


def wide(mask: Tensor) -> Tensor:
    return mask[:, None, None]


MASKS: dict[str, Mix] = {
    "rare": lambda h: torch.rand(len(h)) < 0.02,
    "often": lambda h: torch.rand(len(h)) < 0.95,
    "normal": lambda h: torch.randn(len(h)) > 1.0,
    "coins": lambda h: torch.bernoulli(torch.full((len(h),), 0.3)) > 0,
    "dropped": lambda h: F.dropout(torch.ones(len(h)), 0.3) == 0,
    "category": lambda h: torch.randint(0, 5, (len(h),)) == 3,
    "weighed": lambda h: torch.multinomial(torch.ones(len(h), 3), 1)[:, 0] == 2,
    "in place": lambda h: torch.empty(len(h)).uniform_(-1, 1) > 0.2,
    "late": lambda h: torch.empty(len(h)).exponential_() > 1.0,
    "by the rows": lambda h: torch.rand(len(h)) < h[:, 0, 0].sigmoid(),
    "by noise": lambda h: (h[:, 0, 0] + torch.randn_like(h[:, 0, 0])) > 0,
}
MEETING: dict[str, Chosen] = {
    "divided by how many": lambda h, m: h * wide(m) / m.sum().clamp(min=1),
    "mean of these": lambda h, m: torch.where(wide(m), h - h[m].mean(0).nan_to_num(), h),
    "counted": lambda h, m: h * (1 + wide(m.cumsum(0))),
    "turned": lambda h, m: h.index_put((m.nonzero()[:, 0],), h[m].flip(0)),
    "from the first ones": lambda h, m: h.masked_scatter(wide(m).expand_as(h), h),
    "swapped": lambda h, m: torch.where(wide(m), h[torch.randperm(len(h))], h),
    "ranked": lambda h, m: h * wide((m[:, None].int() > m.int()).sum(1)),
    "sorted": lambda h, m: h * wide(m.double().sort().values + 1),
    "infinite where none is": lambda h, m: h + m.sum().log(),
}
APART: dict[str, Mix] = {
    "these alone": lambda h: h.index_put(((m := MASKS["often"](h)),), 2 * h[m]),
    "tokens": lambda h: h.masked_scatter((m := torch.rand(h.shape[:2]) < 0.5)[..., None], 2 * h[m]),
    "of each row": lambda h: h / (torch.rand(h.shape) < 0.5).sum(1, keepdim=True).clamp(min=1),
    "two views": lambda h: F.dropout(torch.cat([h, h]), 0.4)[: len(h)],
    "heads": lambda h: torch.cat(F.dropout(torch.cat(h.chunk(2, -1)), 0.3).chunk(2), -1),
    "two views beside tokens": lambda h: (
        F.dropout(torch.cat([h, h]), 0.4)[: len(h)] + F.dropout(h.flatten(0, 1), 0.3).view_as(h)
    ),
    "both orders of tokens": lambda h: (
        F.dropout(h.flatten(0, 1), 0.3).view_as(h)
        + F.dropout(h.transpose(0, 1).flatten(0, 1)[:, :2], 0.3)
        .view(TOKENS, -1, 2)
        .transpose(0, 1)
        .repeat(1, 1, 2)
    ),
    "time first": lambda h: F.dropout(h.transpose(0, 1), 0.3).transpose(0, 1),
    "flat": lambda h: F.dropout(h.flatten(0, 1), 0.3).view_as(h),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.3),
    "slopes": lambda h: F.rrelu(h, training=True),
    "categories": lambda h: h * torch.multinomial(h[..., 0].exp(), 1)[..., None],
    "shared": lambda h: h * torch.rand(WIDTH) * (torch.rand(TOKENS, 1) < 0.5) + torch.rand([]),
    "gumbel": lambda h: F.gumbel_softmax(h, dim=-1),
    "one by one": lambda h: torch.stack([row * torch.rand(TOKENS, 1) for row in h]),
}


class Net(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mix
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(torch.tanh(self.first(x))))


def warnings_of(mix: Mix, caplog: pytest.LogCaptureFixture) -> list[str]:
    draw = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(2, ROWS, TOKENS, WIDTH, generator=draw, dtype=torch.float64))
    with caplog.at_level(logging.WARNING, "piper"):
        strategy = [Place(where(), [0]), Split("MB", 2)]
        rehearse(Net(mix), F.mse_loss, strategy, [batch], optimizer=SGD)
    return caplog.messages


BOTH = {f"{a}, {b}": (m, f) for a, m in MASKS.items() for b, f in MEETING.items()}


@one_of(4)
@pytest.mark.parametrize(("mask", "chosen"), every(21, BOTH.values(), BOTH))
def test_rows_that_meet_in_a_drawn_mask_get_a_warning(
    mask: Mix, chosen: Chosen, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = warnings_of(lambda h: chosen(h, mask(h)), caplog)

    assert "rows of the batch meet at test_mixed_draws.py" in said


@one_of(4)
@pytest.mark.parametrize("mix", every(6, APART.values(), APART))
def test_rows_with_draws_of_their_own_are_left_in_peace(
    mix: Mix, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings_of(mix, caplog)
