"""A model's own loss that divides by the number of rows times something, in many forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn

from piper import Place, Split, rehearse, where
from piper.errors import InputError

ROWS, WIDTH = 8, 4
SGD = partial(torch.optim.SGD, lr=0.1)
Made = Callable[["Net", Tensor], Any]  # of a model and its input


def drawn(model: Net, x: Tensor) -> Tensor:
    return (torch.rand(WIDTH) < 0.7).double().sum() + 1


FIXED: dict[str, Made] = {  # the same for any number of rows
    "a number": lambda m, x: 3.0,
    "a tensor": lambda m, x: torch.tensor(3.0, dtype=torch.float64),
    "a buffer": lambda m, x: m.mask.sum(),
    "a parameter": lambda m, x: m.scale,
    "drawn": drawn,
    "drawn, at least one": lambda m, x: drawn(m, x).clamp(min=1),
}
COUNTS: dict[str, Made] = {
    "len": lambda m, x: len(x),
    "shape": lambda m, x: x.shape[0],
    "numel": lambda m, x: x.numel(),
    "tensor of len": lambda m, x: torch.tensor(len(x)),
    "tensor of a float": lambda m, x: torch.tensor(float(len(x)), dtype=torch.float64),
    "full": lambda m, x: torch.full((), float(x.shape[0]), dtype=torch.float64),
    "new_full": lambda m, x: x.new_full((), x.shape[0]),
    "new_tensor": lambda m, x: x.new_tensor(x.shape[0]),
    "scalar tensor": lambda m, x: torch.scalar_tensor(x.shape[0]),
    "ones": lambda m, x: torch.ones(len(x)).sum(),
    "filled": lambda m, x: torch.zeros(()).fill_(len(x)),
}
DIVIDED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "by the product": lambda total, one, count: total / (one * count),
    "in turn": lambda total, one, count: total / one / count,
    "by the other product": lambda total, one, count: total / (count * one),
    "by a little more": lambda total, one, count: total / (one * count + 1e-9),
    "times the inverse": lambda total, one, count: total * (1 / (one * count)),
}


class Net(nn.Module):
    def __init__(self, one: Made, count: Made, divided: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.one, self.count, self.divided = one, count, divided
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        total = (self.layer(x) - x).square().sum()
        return self.divided(total, self.one(self, x), self.count(self, x))


def data(seed: int) -> tuple[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw),)


FORMS = {
    f"{one}, {count}, {how}": (FIXED[one], COUNTS[count], DIVIDED[how])
    for one in FIXED
    for count in COUNTS
    for how in DIVIDED
}


@one_of(4)
@pytest.mark.parametrize(("one", "count", "divided"), every(61, FORMS.values(), FORMS))
def test_a_divisor_with_the_number_of_rows_is_right_or_refused(
    one: Made, count: Made, divided: Callable[..., Any]
) -> None:
    def trained(parts: int) -> list[float]:
        strategy = [Place(where(), [0]), Split("MB", parts)]
        given = Net(one, count, divided), None, strategy, [data(1), data(2)]
        return list(rehearse(*given, optimizer=SGD, seed=3).losses)

    whole = trained(1)
    try:
        found = trained(4)
    except InputError as refused:
        assert "cannot see how it reduces over rows" in str(refused)
        return
    assert found == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("one", every(3, FIXED.values(), FIXED))
def test_a_product_with_the_number_of_rows_needs_no_help(one: Made) -> None:
    model = Net(one, COUNTS["len"], DIVIDED["by the product"])
    strategy = [Place(where(), [0]), Split("MB", 4)]

    assert rehearse(model, None, strategy, [data(1)], optimizer=SGD, seed=3).losses
