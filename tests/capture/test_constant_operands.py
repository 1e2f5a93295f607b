"""Tensors that are constants of a graph, beside others whose derivative computes with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse

WIDTH = 4
SGD = partial(torch.optim.SGD, lr=0.1)
WEIGHT = torch.linspace(0.5, 2.0, WIDTH, dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lerp": lambda h, w: torch.lerp(h, h.flip(-1), w),
    "lerp to it": lambda h, w: torch.lerp(h, w, 0.3),
    "lerp from it": lambda h, w: torch.lerp(w, h, w),
    "addcdiv": lambda h, w: torch.addcdiv(h, h, w, value=0.5),
    "addcdiv of it": lambda h, w: torch.addcdiv(w, w, h.exp()),
    "addcmul": lambda h, w: torch.addcmul(h, h, w),
    "a power": lambda h, w: h.abs().add(0.1) ** w,
    "its power": lambda h, w: w**h,
    "a remainder": lambda h, w: torch.remainder(h, w),
    "an angle": lambda h, w: torch.atan2(h, w),
    "a hypotenuse": lambda h, w: torch.hypot(h, w),
    "xlogy": lambda h, w: torch.xlogy(w, h.abs() + 1),
    "a batch of products": lambda h, w: torch.baddbmm(
        h[:, None], h[:, None], w.diag()[None].expand(len(h), -1, -1)
    )[:, 0],
    "a norm": lambda h, w: F.layer_norm(h, (WIDTH,), w, w),
}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(WIDTH, WIDTH).double(), function
        self.weight = WEIGHT.clone() if own else None

    def forward(self, x: Tensor) -> Tensor:
        weight = WEIGHT if self.weight is None else self.weight
        return self.function(self.layer(x), weight)


BATCHES = list(
    torch.randn(2, 2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
)
FORMS = {
    f"{name}, {where}": (function, own)
    for name, function in FUNCTIONS.items()
    for where, own in (("an attribute", True), ("a global", False))
}


@one_of(2)
@pytest.mark.parametrize(("function", "own"), every(9, FORMS.values(), FORMS))
def test_constants_are_operands_as_in_plain_training(
    function: Callable[[Tensor, Tensor], Tensor], own: bool
) -> None:
    batches, model = [(x, y) for x, y in BATCHES], Net(function, own)
    right = plain_losses(SGD(model.parameters()), batches, lambda x, y: F.mse_loss(model(x), y))

    found = rehearse(Net(function, own), F.mse_loss, None, batches, optimizer=SGD)

    assert found.losses == pytest.approx(right, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-10, atol=0)
