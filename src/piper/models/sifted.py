"""A small model whose rows between stages are as many as the data say."""

import torch
from torch import Tensor, nn

from piper.capture import annotate


class Sifted(nn.Module):
    """x [batch, dim] -> a loss; the second stage sees some rows, and all of a second value."""

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
