"""A loss that squeezes all dimensions of size 1 loses that of rows, if a microbatch has one row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.errors import InputError
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1)


def manual(output: Tensor, wanted: Tensor) -> Tensor:
    return (output - wanted).square().mean()


@one_of(2)
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, manual])
def test_it_is_refused_with_what_to_write(loss: object) -> None:
    def squeezed(output: Tensor, wanted: Tensor) -> Tensor:
        return loss(output.squeeze(), wanted.squeeze())  # type: ignore[operator]

    batches = [(torch.randn(4, 3), torch.randn(4, 1))]
    with pytest.raises(InputError, match="cannot see in its graph that it is a mean over rows"):
        rehearse(
            nn.Linear(3, 1), squeezed, one_f_one_b(pp=1, microbatches=4), batches, optimizer=SGD
        )
