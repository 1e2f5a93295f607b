"""Rows that meet only where values are on the far side of those that the model compares with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F
from warned import warned

ROWS, TOKENS, WIDTH, WORDS = 8, 6, 4, 5000
Mask = Callable[[Tensor, Tensor], Tensor]  # of ids and numbers: which tokens
Chosen = Callable[[Tensor, Tensor], Tensor]  # of tokens, and a mask of some of them
FLAGS = torch.arange(WORDS) >= 4000

MASKS: dict[str, Mask] = {
    "an id": lambda ids, x: ids == 3017,
    "all but ids": lambda ids, x: ~((ids != 3017) & (ids != 4021)),
    "some ids": lambda ids, x: torch.isin(ids, torch.tensor([3017, 4021])),
    "large ids": lambda ids, x: ids > 2000,
    "between": lambda ids, x: (ids >= 2000) & (ids < 2010),
    "a table": lambda ids, x: FLAGS[ids],
    "a tensor": lambda ids, x: ids.eq(torch.tensor(3017)),
    "a number": lambda ids, x: x[..., 0] > 3000,
    "a shift": lambda ids, x: (x - 1000).relu().amax(-1) > 0,
    "a missing one": lambda ids, x: x[..., 0] == -999,
    "a bucket": lambda ids, x: (
        torch.bucketize(x[..., 0].clone(), torch.tensor([1e3, 1e4]).double()) > 0
    ),
}
MEETING: dict[str, Chosen] = {
    "mean of these": lambda h, m: torch.where(m[..., None], h - h[m].mean(0).nan_to_num(), h),
    "counted": lambda h, m: h * (1 + m.any(1).cumsum(0)[:, None, None]),
    "from the first ones": lambda h, m: h.masked_scatter(m[..., None].expand_as(h), h),
    "as many": lambda h, m: h / m.sum().clamp(min=1),
}
APART: dict[str, Chosen] = {
    "these": lambda h, m: torch.where(m[..., None], 2 * h, h),
    "selected": lambda h, m: h.index_put((m,), h[m].tanh()),
    "of its row": lambda h, m: h / m.sum(1).clamp(min=1)[:, None, None],
    "what is before": lambda h, m: h * m.cumsum(1)[..., None],
}


class Net(nn.Module):
    def __init__(self, mask: Mask, chosen: Chosen) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 9)
        self.mask, self.chosen = mask, chosen
        self.double()

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        found = self.chosen(self.words(ids) + torch.tanh(x), self.mask(ids, x))
        return self.last(found).transpose(1, 2)


def warnings_of(mask: Mask, chosen: Chosen, caplog: pytest.LogCaptureFixture) -> list[str]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 50, (ROWS, TOKENS), generator=draw)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    return warned(caplog, Net(mask, chosen), F.cross_entropy, (ids, x, ids % 9), whole=[])


FORMS = {f"{a}, {b}": (m, f) for a, m in MASKS.items() for b, f in MEETING.items()}
CLEAN = {f"{a}, {b}": (m, f) for a, m in MASKS.items() for b, f in APART.items()}


@one_of(2)
@pytest.mark.parametrize(("mask", "chosen"), every(9, FORMS.values(), FORMS))
def test_rows_that_meet_beyond_a_constant_get_a_warning(
    mask: Mask, chosen: Chosen, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = warnings_of(mask, chosen, caplog)

    assert "rows of the batch meet at test_compared_values.py" in said


@pytest.mark.parametrize(("mask", "chosen"), every(31, CLEAN.values(), CLEAN))
def test_rows_that_stay_apart_beyond_a_constant_are_left_in_peace(
    mask: Mask, chosen: Chosen, caplog: pytest.LogCaptureFixture
) -> None:
    assert not warnings_of(mask, chosen, caplog)
