"""A layer that is called without gradients first, and then with them, under tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from searched_blocks import BLOCKS, D, Layer, T
from torch import Tensor, nn
from torch.nn import functional as F

from piper import annotate, rehearse, strategies

SGD = torch.optim.SGD


class Distilled(nn.Module):
    """The first layer's output is the teacher of the second's: two calls of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(*BLOCKS[name]) for name in ("halting", "haar"))
        self.out = nn.Linear(D, 4)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, keep = torch.zeros(x.shape[:2], dtype=torch.long), x[..., 0] > -9
        with annotate("L"):
            first = self.layers[0](x, ids, keep)
        with annotate("L"):
            last = self.layers[1](first, ids, keep)
            with torch.no_grad():
                teacher = self.out(first)
            return self.out(last), teacher


def distance(output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    return F.mse_loss(*output)


@pytest.mark.soak
def test_a_piece_that_is_first_read_without_gradients_has_them_later() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, T, D, generator=draw, dtype=torch.float64)
    plain = Distilled()
    distance(plain(x), x).backward()
    SGD(plain.parameters(), lr=0.1).step()

    found = rehearse(
        Distilled(), distance, strategies.one_f_one_b(pp=1, microbatches=1, tp=2), [(x, x)],
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
    )  # fmt: skip

    for name, parameter in plain.named_parameters():
        if name in found.parameters:
            torch.testing.assert_close(found.parameters[name], parameter.detach())
