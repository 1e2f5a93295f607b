"""Parameters without elements: no shard has a piece of them, and they keep their type."""

from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.none = nn.Linear(3, 3), nn.Parameter(torch.randn(0, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.none.sum(0)


@one_of(2)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_parameter_without_elements_keeps_its_type(zero: int) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    strategy = one_f_one_b(pp=1, microbatches=2, dp=2, zero=zero)

    found = rehearse(Net(), F.mse_loss, strategy, [(x, x)], optimizer=SGD)

    assert found.parameters["none"].dtype is torch.float64
    assert found.parameters["none"].shape == (0, 3)
