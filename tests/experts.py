"""A small mixture of experts in float64, with routing that a test can control."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import annotate
from piper.models.grouped import grouped_mm

WIDTH, EXPERTS, HIDDEN = 6, 4, 5
# What is added to the routing logits of expert 0, 1, ...; and how many experts see a token.
ROUTINGS = {
    "spread": ((0.0, 0.0, 0.0, 0.0), 2),
    "skewed": ((0.4, 0.2, -0.1, -0.3), 2),
    "one": ((0.0, 0.0, 1e3, 0.0), 1),  # one expert gets all tokens
    "none": ((-1e3, 0.0, 0.0, -1e3), 2),  # two experts get none
}
ALIKE = {"skewed": "spread", "none": "spread"}  # the same graph, with other values


class Layer(nn.Module):
    """A dense part, then experts, then a side loss of each row of the batch."""

    def __init__(self, bias: tuple[float, ...], chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.bias = nn.Parameter(torch.tensor(bias), requires_grad=False)
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 2)
        self.back = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 2)
        self.gain = nn.Parameter(torch.ones(EXPERTS, 1, 1), requires_grad=False)

    def forward(self, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        x = x + torch.tanh(self.dense(x))
        shares = (self.router(x) + self.bias).softmax(-1)
        score, expert = shares.topk(self.chosen)
        side = side + (shares.mean(1) ** 2).sum(-1)
        expert = expert.flatten()
        order = expert.argsort(stable=True)
        counts = expert.new_zeros(EXPERTS).scatter_add(0, expert, torch.ones_like(expert))
        rows = x.flatten(0, 1)[order // self.chosen]
        with annotate("EP"):
            rows = grouped_mm(rows, self.into * self.gain, counts)
            rows = grouped_mm(functional.silu(rows), self.back, counts)
        rows = torch.zeros_like(rows).index_copy(0, order, rows)
        mixed = rows.view(*score.shape, WIDTH) * score.unsqueeze(-1)
        return x + mixed.sum(2), side


class Mixed(nn.Module):
    """Rows [batch, time, width] -> the same, and a side loss for each row of the batch."""

    def __init__(self, stages: int, routing: str, layers: int = 1) -> None:
        super().__init__()
        self.stages, self.layers = stages, layers
        bias, chosen = ROUTINGS[routing]
        turned = [(*bias[-k % EXPERTS :], *bias[: -k % EXPERTS]) for k in range(stages * layers)]
        self.blocks = nn.ModuleList(Layer(row, chosen) for row in turned)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = x.new_zeros(x.shape[0])
        for k, block in enumerate(self.blocks):
            with annotate("PP", k // self.layers):
                x, side = block(x, side)
        with annotate("PP", self.stages - 1):
            return self.head(x), side


def loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The side loss has the same weight as the other loss, so a missing part of it shows."""
    found, side = output
    return functional.mse_loss(found, labels.to(found.dtype)) + side.mean()
