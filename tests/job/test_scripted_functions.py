"""Functions of torch.jit.script, which models call for their activations and norms."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, where
from piper.errors import CaptureError, InputError

SGD = partial(torch.optim.SGD, lr=0.1)


class Fields(ctypes.Structure):
    """Nobody watches it."""

    _fields_ = [("factor", ctypes.c_double)]


FIELDS = Fields(0.5)


@torch.jit.script
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@torch.jit.script
def scaled(x: Tensor, factor: float) -> Tensor:
    return torch.relu(x) * factor + x.sigmoid()


@torch.jit.script
def normed(x: Tensor, dims: list[int]) -> Tensor:
    if x.dim() == 2:
        x = x - x.mean(dims, keepdim=True)
    return x


@torch.jit.script
def gated(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = x.sigmoid()
    return x * gate


@torch.jit.script
def outer(x: Tensor) -> Tensor:
    return gated(x) + 1.0


GATES = {"itself": gated, "inside": outer}


class Gated(nn.Module):
    def __init__(self, gate: str) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(6, 4).double(), gate

    def forward(self, x: Tensor) -> Tensor:
        return GATES[self.gate](self.layer(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, bias=False).double()
        self.bias = nn.Parameter(torch.zeros(6).double())
        self.last = nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        x = bias_gelu(self.first(normed(x, [-1])), self.bias)
        result: Tensor = self.last(scaled(x, FIELDS.factor))
        return result


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 6).double(), torch.randint(4, (6,))) for _ in range(4)]


@one_of(2)
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("parts", [1, 3])
def test_they_train_as_plain_pytorch(parts: int, before: int) -> None:
    """TorchScript runs another graph after some calls, also after those of the user."""
    strategy, model = [Place(where(), [0]), Split("MB", parts)], Net()
    for x, _ in batches()[:before]:
        model(x).sum()

    with Trainer(model, F.cross_entropy, strategy, example=batches()[0], optimizer=SGD) as trainer:
        found = [float(trainer.step(*one).loss) for one in batches()]

    plain = Net()
    wanted = plain_losses(
        SGD(plain.parameters()), batches(), lambda x, y: F.cross_entropy(plain(x), y)
    )
    torch.testing.assert_close(found, wanted)


def test_what_they_are_given_is_watched() -> None:
    """The forward runs again, and sees another number."""
    with Trainer(Net(), F.cross_entropy, example=batches()[0], optimizer=SGD) as trainer:
        try:
            with pytest.raises(InputError, match="0.75 in place of 0.5"):
                for x, y in batches():
                    trainer.step(x, y)
                    FIELDS.factor += 0.25
        finally:
            FIELDS.factor = 0.5


@pytest.mark.parametrize("gate", GATES)
def test_modes_that_they_set_are_refused(gate: str) -> None:
    with pytest.raises(CaptureError, match="has a `with` statement") as refused:
        Trainer(Gated(gate), F.cross_entropy, example=batches()[0], optimizer=SGD)

    assert "test_scripted_functions.py:" in str(refused.value)
