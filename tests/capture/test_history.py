"""What a model asks of its tensors' history is what it is in eager training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture.test_features import Model, captured_like_eager, rows
from torch import Tensor

ASKED: dict[str, Callable[[Tensor], bool]] = {
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "is_leaf": lambda x: not x.is_leaf,
}


def made(self: Model, x: Tensor) -> dict[str, Tensor]:
    y = self.a(x)
    with torch.no_grad():
        without = self.a(x)
    filled = torch.zeros(8)
    filled += y[0]
    return {
        "activation": y, "batch": x, "parameter": self.a.weight, "frozen": self.b.weight,
        "by frozen": self.b(x), "detached": y.detach(), "data": y.data, "without": without,
        "index": y.argmax(-1), "view": y.view(-1), "filled": filled, "mixed": self.b(y),
        "buffer": torch.ones(8),
    }  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_branches_on_the_history_of_a_tensor(name: str) -> None:
    """Each answer is a digit of a factor, so that any wrong one changes the loss."""

    def forward(self: Model, x: Tensor) -> Tensor:
        answers = [ASKED[name](tensor) for tensor in made(self, x).values()]
        factor = 1 + sum(2.0**-k for k, yes in enumerate(answers) if yes)
        return (self.c(self.a(x)) * factor).square().mean()

    model = Model(forward)
    model.b.requires_grad_(False)

    captured_like_eager(model, rows())
