"""Writes to parts of complex tensors, as Fourier neural operators make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.strategies import one_f_one_b

WIDTH, MODES, SIZE = 4, 3, 8
SGD = partial(torch.optim.SGD, lr=0.1)
Write = Callable[[Tensor, Tensor], Any]


def sliced(out: Tensor, y: Tensor) -> None:
    out[..., :MODES] = y


def selected(out: Tensor, y: Tensor) -> None:
    for k in range(MODES):
        out[..., -k - 1] = y[..., k]


def with_steps(out: Tensor, y: Tensor) -> None:
    out[:, ::2, :MODES] = y[:, ::2]
    out[..., 0::4] *= 1j


def diagonal(out: Tensor, y: Tensor) -> None:
    square = torch.zeros(len(y), WIDTH, MODES, dtype=out.dtype)
    square.diagonal(dim1=1, dim2=2).copy_(y.diagonal(dim1=1, dim2=2))
    square.diagonal(-1, -2, -1).add_(y[:, 1])
    out[..., :MODES] = square


def conjugated(out: Tensor, y: Tensor) -> None:
    out[..., :MODES] = y.conj()
    out[..., 1:].conj()[..., 0] = y[..., 1]


def in_two_corners(out: Tensor, y: Tensor) -> None:
    out[..., :2] = y[..., :2]
    out[..., -2:] += y[..., 1:]


def of_real_numbers(out: Tensor, y: Tensor) -> None:
    out[..., :MODES] = y.real
    out.imag[..., 1] = y.imag[..., 0]


WRITES: dict[str, Write] = {
    one.__name__: one
    for one in (
        sliced, selected, with_steps, diagonal, conjugated, in_two_corners, of_real_numbers,
    )
}  # fmt: skip


class Fourier(nn.Module):
    """With one output for each way to write, which are added."""

    def __init__(self, *writes: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.writes = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1), writes
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cdouble) / 4)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.first(x[..., None]).transpose(1, 2))
        y = torch.einsum("bix,iox->box", found[..., :MODES], self.weight)
        outs = [torch.zeros(len(x), WIDTH, found.shape[-1], dtype=y.dtype) for _ in self.writes]
        for k, (write, out) in enumerate(zip(self.writes, outs, strict=True), start=1):
            write(out, y / k)
        mixed: Tensor = self.last(torch.fft.irfft(sum(outs), n=SIZE).transpose(1, 2))
        return mixed[..., 0]


def model(*writes: Write) -> nn.Module:
    made = Fourier(*writes)
    made.first.double()
    made.last.double()
    return made


WAYS = [  # all of them together; each by itself is a soak
    pytest.param([*WRITES.values()], 2, id="all"),
    *(
        pytest.param([write], parts, id=f"{name}-{parts}", marks=pytest.mark.soak)
        for name, write in WRITES.items()
        for parts in (1, 2)
    ),
]


@pytest.mark.parametrize(("writes", "microbatches"), WAYS)
def test_they_train_as_without_piper(writes: list[Write], microbatches: int) -> None:
    mine, plain = (model(*writes) for _ in range(2))
    torch.manual_seed(1)
    batches = [(torch.randn(4, SIZE).double(), torch.randn(4, SIZE).double()) for _ in range(3)]

    strategy = one_f_one_b(pp=1, microbatches=microbatches)
    found = rehearse(mine, F.mse_loss, strategy, batches, optimizer=SGD)

    wanted = plain_losses(SGD(plain.parameters()), batches, lambda x, y: F.mse_loss(plain(x), y))
    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for key, value in plain.named_parameters():
        torch.testing.assert_close(found.parameters[key], value.detach(), rtol=1e-10, atol=1e-12)
