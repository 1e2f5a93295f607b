"""A small U-Net-like MLP: what goes down at one stage comes up at its mirror image."""

import torch
from torch import Tensor, nn

from piper.capture import annotate


class Skips(nn.Module):
    """x [batch, dim] -> [batch, dim] in 2 * depth regions; stage s feeds stage 2*depth - 1 - s."""

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
