"""Small annotated models that only tests train."""

import torch
from torch import Tensor, nn

from piper.capture import annotate


class Skips(nn.Module):
    """A U-Net-like MLP: x [batch, dim] -> [batch, dim] in 2 * depth regions.

    Stage s feeds its mirror image, stage 2 * depth - 1 - s.
    """

    def __init__(self, dim: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for layer in self.down:
            with annotate("PP"):
                x = torch.tanh(layer(x))
                skipped.append(x)
        for layer in self.up:
            with annotate("PP"):
                x = torch.tanh(layer(torch.cat((x, skipped.pop()), dim=-1)))
        return x


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Sifted(nn.Module):
    """x [batch, dim] -> a loss. The data decide how many rows the first stage sends to the second.

    The second stage also reads a value with all rows.
    """

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            rows = self.first(x)
            some = rows.index_select(0, (x[:, 0] > 0).nonzero().squeeze(1))
        with annotate("PP"):
            return self.second(some).tanh().sum() + (rows * rows).sum()
