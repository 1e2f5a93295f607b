"""Rows that meet only where numbers of theirs are equal, or too many are alike.

They are of one user or query, nearly the same, or choose the same expert: random data hardly ever
has any, and real batches do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, levels_of, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.capture import capture
from piper.errors import InputError
from piper.strategies import one_f_one_b

ROWS, WIDTH = 8, 6
SGD = partial(torch.optim.SGD, lr=0.1)
Change = Callable[[Tensor, Tensor], Tensor]


def same(ids: Tensor) -> Tensor:
    return ids[:, None] == ids[None]


def group_mean(h: Tensor, ids: Tensor) -> Tensor:
    together = same(ids).to(h.dtype)
    return h - together @ h / together.sum(1, keepdim=True)


def ranked(h: Tensor, ids: Tensor) -> Tensor:
    before = same(ids) & (h[:, None, 0] > h[None, :, 0])
    return h * before.sum(1, keepdim=True)


def first_only(h: Tensor, ids: Tensor) -> Tensor:
    return h * ~torch.tril(same(ids), -1).any(1, keepdim=True)


def attended(h: Tensor, ids: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=same(ids))[0]


def by_unique(h: Tensor, ids: Tensor) -> Tensor:
    found = torch.zeros(100_000, WIDTH, dtype=h.dtype).index_add(0, ids, h)
    return h + found[ids]


def rare(h: Tensor, ids: Tensor) -> Tensor:
    return h / torch.bincount(ids, minlength=100_000)[ids][:, None]


def near_duplicates(h: Tensor, ids: Tensor) -> Tensor:
    directions = F.normalize(h, dim=1)
    return h / ((directions @ directions.T) > 0.999).sum(1, keepdim=True).clamp(min=1)


def capacity(h: Tensor, ids: Tensor, factor: float) -> Tensor:
    """Rows beyond what an expert takes are dropped."""
    chosen = F.one_hot(h[:, :4].argmax(1), 4)
    place = (chosen.cumsum(0) * chosen).sum(1) - 1
    return h * (place < int(factor * len(h) / 4))[:, None]


MEETING: dict[str, Change] = {
    "group mean": group_mean,
    "ranked": ranked,
    "first only": first_only,
    "attended": attended,
    "index_add": by_unique,
    "bincount": rare,
    "near duplicates": near_duplicates,
    "capacity 1.5": partial(capacity, factor=1.5),
    "capacity 2": partial(capacity, factor=2.0),
    "bias by pairs": lambda h, ids: h + same(ids).sum(1, keepdim=True).log(),
}


def documents(h: Tensor, ids: Tensor) -> Tensor:
    """Tokens of one row that belong to one document, as packed rows have them."""
    marks = (ids[:, None] >> torch.arange(WIDTH)) & 1
    together = (marks[:, :, None] == marks[:, None, :]).to(h.dtype)
    return (together @ h[:, :, None])[:, :, 0]


APART: dict[str, Change] = {
    "looked up": lambda h, ids: h * torch.linspace(0, 1, 100_000, dtype=h.dtype)[ids][:, None],
    "compared with columns": lambda h, ids: h * (ids[:, None] > torch.arange(WIDTH)),
    "documents": documents,
    "outer product": lambda h, ids: (h[:, :, None] * h[:, None, :]).sum(2) + ids[:, None] % 7,
}


class Net(nn.Module):
    def __init__(self, change: Change, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.change, self.own = change, own

    def forward(self, x: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
        found: Tensor = self.last(self.change(self.first(x), ids))
        return F.mse_loss(found, wanted) if self.own else found


def batches() -> list[Any]:
    draw = torch.Generator().manual_seed(3)

    def one() -> Any:
        x, wanted = (torch.randn(ROWS, WIDTH, generator=draw).double() for _ in range(2))
        ids = torch.randint(100_000, (ROWS,), generator=draw)
        return x, ids, wanted

    return [one() for _ in range(2)]


def run(change: Change, own: bool) -> tuple[Any, nn.Module]:
    model = Net(change, own)
    given = batches() if own else [(*one, one[2]) for one in batches()]
    loss = None if own else F.mse_loss
    strategy = one_f_one_b(pp=1, microbatches=2)
    return rehearse(deepcopy(model), loss, strategy, given, optimizer=SGD), model


CASES = [(name, own) for own in (False, True) for name in MEETING]


@one_of(2)
@pytest.mark.parametrize(("name", "own"), every(3, CASES))
def test_rows_that_meet_are_seen(name: str, own: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        try:
            run(MEETING[name], own)
        except InputError as refused:
            assert "reduces over rows" in str(refused) or "microbatches" in str(refused)
        else:
            assert "rows of the batch meet" in caplog.text


@one_of(2)
@pytest.mark.parametrize(("name", "own"), levels_of(APART, [False, True]))
def test_rows_apart_give_no_alarm(name: str, own: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "piper"):
        found, plain = run(APART[name], own)
    assert caplog.text == ""

    def loss_of(*one: Tensor) -> Tensor:
        output = plain(*one)
        return output if own else F.mse_loss(output, one[2])

    wanted = plain_losses(SGD(plain.parameters()), batches(), loss_of)
    assert found.losses == pytest.approx(wanted, rel=1e-10)


def topk(h: Tensor, ids: Tensor) -> Tensor:
    return h * (h[:, :1] >= h[:, :1].topk(3, 0)[0][-1])


def by_order(h: Tensor, ids: Tensor) -> Tensor:
    return h + h.sort(0)[0]


SHOWN = {name: MEETING[name] for name in ("group mean", "ranked", "first only", "attended")} | {
    "capacity": MEETING["capacity 1.5"],
    "topk": topk,
    "sorted": by_order,
}


@one_of(3)
@pytest.mark.parametrize("name", [*SHOWN, *APART])
def test_graphs_alone_show_it_where_a_model_is_too_large_for_a_trial(name: str) -> None:
    change = SHOWN.get(name) or APART[name]
    x, ids, wanted = batches()[0]
    found = capture(Net(change, False), F.mse_loss, (x, ids, wanted, wanted)).meeting
    assert ("test_equal_rows.py" in found) == (name in SHOWN)
