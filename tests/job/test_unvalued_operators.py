"""Operators that look at values, as `istft` looks at its window: in microbatches and divided."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional

from piper import rehearse
from piper.errors import PiperError
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Enhancer(nn.Module):
    """As in speech enhancement: a mask over frequencies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 64).double(), nn.Linear(64, 64).double()
        self.mask = nn.Parameter(torch.ones(9, 1).double())
        self.window = torch.hann_window(16).double()

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stft(self.first(x), 16, 4, window=self.window, return_complex=True)
        return self.last(torch.istft(found * self.mask, 16, 4, window=self.window, length=64))


@one_of(2)
@pytest.mark.parametrize("ways", [{}, {"tp": 2}, {"cp": 2}, {"dp": 2, "zero": 2}], ids=str)
def test_it_trains_as_plain_pytorch_without_a_warning(
    ways: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(2, 8, 64, generator=draw).double()) for _ in range(3)]
    model = Enhancer()
    losses = plain_losses(
        SGD(model.parameters()), batches, lambda x, wanted: functional.mse_loss(model(x), wanted)
    )

    strategy = one_f_one_b(pp=1, microbatches=2, **ways)
    with caplog.at_level(logging.WARNING, "piper"):
        found = rehearse(Enhancer(), functional.mse_loss, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        given = found.parameters[name], parameter.detach()
        torch.testing.assert_close(*given, rtol=1e-10, atol=1e-12)
    assert "calls something else" not in caplog.text


class Chosen(nn.Module):
    """The tokens that a mask of the batch chooses: nobody knows how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x)[mask].view(len(x), -1, 3)


def test_a_loss_of_outputs_of_unknown_size_is_no_raw_error() -> None:
    x, mask = torch.randn(4, 6, 4).double(), torch.ones(4, 6, dtype=torch.bool)

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return output.amax(1).logsumexp(0).sum() + labels.mean()

    with pytest.raises(PiperError):
        rehearse(
            Chosen(), loss_fn, one_f_one_b(pp=1, microbatches=2), [(x, mask, x)], optimizer=SGD
        )
