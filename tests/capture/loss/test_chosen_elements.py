"""Means over the elements that a mask chooses: Piper counts them, however they are chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import drawn, draws, every, one_of
from loss_forms import PARTS, ROWS, Loss, difference, form_of
from torch import Tensor
from torch.nn import functional as F

Masks = Callable[[Any], Tensor]
Choice = Callable[[Tensor, Any, Masks], Tensor]  # of a tensor; the mask is computed anew each time

OF_ROWS: dict[str, Masks] = {
    "weights": lambda y: y["weight"] > 0.7,
    "labels": lambda y: y["k"] != 2,
    "both": lambda y: (y["weight"] > 0.3) & ~(y["k"] == 0),
    "any": lambda y: y["mask"].any(1),
    "written": lambda y: (y["weight"] > 0.7).clone().logical_or_(y["k"] == 1),
}
OF_ELEMENTS: dict[str, Masks] = {
    "given": lambda y: y["mask"],
    "values": lambda y: y["y"] > -0.2,
    "both": lambda y: (y["y"] > -1) & y["mask"],
    "not a number": lambda y: ~torch.isnan(y["y"].masked_fill(y["mask"], torch.nan)),
}
ROW_CHOICES: dict[str, Choice] = {
    "index": lambda t, y, m: t[m(y)],
    "index, all columns": lambda t, y, m: t[m(y), :],
    "nonzero": lambda t, y, m: t[m(y).nonzero().squeeze(1)],
    "nonzero, column": lambda t, y, m: t[m(y).nonzero()[:, 0]],
    "nonzero, flat": lambda t, y, m: t[m(y).nonzero().flatten()],
    "nonzero, tuple": lambda t, y, m: t[m(y).nonzero(as_tuple=True)],
    "where": lambda t, y, m: t[torch.where(m(y))[0]],
    "index_select": lambda t, y, m: t.index_select(0, m(y).nonzero().view(-1)),
    "masked_select": lambda t, y, m: t.masked_select(m(y)[:, None]),
    "expanded": lambda t, y, m: torch.masked_select(t, m(y).unsqueeze(1).expand_as(t)),
}
ELEMENT_CHOICES: dict[str, Choice] = {
    "index": lambda t, y, m: t[m(y)],
    "masked_select": lambda t, y, m: t.masked_select(m(y)),
    "where": lambda t, y, m: t[torch.where(m(y))],
    "nonzero, tuple": lambda t, y, m: t[m(y).nonzero(as_tuple=True)],
}
WRONG_CHOICES: dict[str, Choice] = {
    "the first ones": lambda t, y, m: t[m(y).nonzero()[:1, 0]],
    "all but one": lambda t, y, m: t[m(y).nonzero()[1:, 0]],
    "other rows": lambda t, y, m: t[m(y)].roll(1, 0),
    "reversed": lambda t, y, m: t[m(y).nonzero().flip(0).squeeze(1)],
    "the next row": lambda t, y, m: t[m(y)[:-1].nonzero().squeeze(1) + 1],
}
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "by hand": lambda a, b: (a - b).square().mean(),
    "bce": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    "over its size": lambda a, b: F.mse_loss(a, b, reduction="sum") / a.shape[0],
    "over its elements": lambda a, b: (a - b).abs().sum() / a.numel(),
    "divided first": lambda a, b: (F.l1_loss(a, b, reduction="none") / b.shape[0]).sum(),
    "a sum": lambda a, b: F.mse_loss(a, b, reduction="sum"),
}


def loss_of(mask: Masks, choice: Choice, reduction: Callable[..., Tensor]) -> Loss:
    return lambda o, y: reduction(choice(o["x"], y, mask), choice(y["y"], y, mask))


def cases(seed: int) -> tuple[str, Loss]:
    """A mask, a way to choose by it, and a reduction."""
    rng = random.Random(seed)
    masks, choices = rng.choice([(OF_ROWS, ROW_CHOICES), (OF_ELEMENTS, ELEMENT_CHOICES)])
    names = [rng.choice(list(one)) for one in (masks, choices, REDUCTIONS)]
    loss = loss_of(masks[names[0]], choices[names[1]], REDUCTIONS[names[2]])
    return ", ".join(names), loss


@drawn
def test_what_is_chosen_is_counted() -> None:
    for seed in range(draws(4, 300)):
        name, loss = cases(seed)
        form = form_of(loss, PARTS)

        assert form.kind is not None, name
        assert max(difference(loss, form, one) for one in range(1, 4)) < 1e-12, name


EACH = [
    *((OF_ROWS["weights"], one, F.mse_loss) for one in ROW_CHOICES.values()),
    *((OF_ELEMENTS["values"], one, F.mse_loss) for one in ELEMENT_CHOICES.values()),
    *((OF_ROWS["both"], ROW_CHOICES["where"], one) for one in REDUCTIONS.values()),
]


@one_of(2)
@pytest.mark.parametrize(("mask", "choice", "reduction"), every(5, EACH))
def test_each_way_to_choose_and_each_reduction_is_known(
    mask: Masks, choice: Choice, reduction: Callable[..., Tensor]
) -> None:
    assert form_of(loss_of(mask, choice, reduction)).kind is not None


@pytest.mark.parametrize("name", every(2, WRONG_CHOICES))
def test_a_part_of_what_is_chosen_is_not_proved(name: str) -> None:
    mask, choice = OF_ROWS["weights"], WRONG_CHOICES[name]

    def loss(o: Any, y: Any) -> Tensor:
        return choice((o["x"] - y["y"]).square(), y, mask).sum() / mask(y).sum()

    form = form_of(loss)

    assert form.kind is None or max(difference(loss, form, one) for one in range(1, 4)) < 1e-12


def test_numbers_of_columns_do_not_choose_rows() -> None:
    def loss(o: Any, y: Any) -> Tensor:
        _, columns = torch.where(y["mask"])
        return o["x"][columns % ROWS].mean()

    assert form_of(loss).kind is None


def test_a_mask_of_outputs_is_not_counted() -> None:
    """Processes could not count it before they run the model."""

    def loss(o: Any, y: Any) -> Tensor:
        return F.mse_loss(o["x"][o["x"] > 0], y["y"][o["x"] > 0])

    assert form_of(loss).kind is None
