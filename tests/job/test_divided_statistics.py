"""A batch norm beside divided regions: its statistics are those of plain PyTorch."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper import Place, Shard, where

SGD = partial(torch.optim.SGD, lr=0.1)


class Front(nn.Module):
    """A body to divide, and a batch norm before it, between its halves, or behind it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place = place
        self.front, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x) if self.place == "before" else x
        x = self.half(x, 0)
        x = self.normed(x) if self.place == "between" else x
        x = self.half(x, 2)
        return self.normed(x) if self.place == "behind" else x

    def normed(self, x: Tensor) -> Tensor:
        with piper.annotate("FRONT"):
            found: Tensor = self.norm(self.front(x))
            return found

    def half(self, x: Tensor, first: int) -> Tensor:
        with piper.annotate("BODY"):
            found: Tensor = self.body[first + 1](torch.relu(self.body[first](x)))
            return x + found


@one_of(2)
@pytest.mark.parametrize(
    ("what", "place"), every(5, product(["weights", "tokens"], ["before", "between", "behind"]))
)
def test_statistics_beside_a_divided_region(place: str, what: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [(x, y) for x, y in torch.randn((3, 2, 8, 6), generator=generator).double()]
    model = Front(place)
    plain = copy.deepcopy(model)
    losses = plain_losses(
        SGD(plain.parameters()), batches, lambda x, y: functional.mse_loss(plain(x), y)
    )
    strategy = [Place(where(), [0, 1]), Shard(where(BODY="*"), [0, 1], what=what)]

    found = piper.rehearse(model, functional.mse_loss, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    wanted = dict(plain.named_parameters()) | dict(plain.named_buffers())
    assert {"norm.running_mean", "norm.running_var"} <= found.parameters.keys()
    for name, one in found.parameters.items():
        torch.testing.assert_close(one, wanted[name].detach(), rtol=1e-10, atol=1e-12)
