"""A loss that divides each column by its own count is no mean that microbatches can weigh."""

from collections.abc import Callable

import pytest
import torch
from draws import every
from torch import Tensor, nn

from piper import Place, Split, rehearse, where
from piper.errors import PiperError

COLUMNS: list[Callable[[Tensor], Tensor]] = [
    lambda counts: counts.clamp(min=1),
    lambda counts: counts + 1,
    lambda counts: counts + 1e-8,
    lambda counts: counts,
]


@pytest.mark.parametrize("divisor", every(2, COLUMNS))
def test_counts_of_columns_are_refused(divisor: Callable[[Tensor], Tensor]) -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        mask = labels > 0
        errors = (outputs - labels).square() * mask
        return (errors.sum(0) / divisor(mask.sum(0))).mean()

    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 3, generator=draw), torch.randn(8, 3, generator=draw)
    with pytest.raises(PiperError, match="loss"):
        rehearse(nn.Linear(3, 3), loss, [Place(where(), [0]), Split("MB", 4)], [batch])
