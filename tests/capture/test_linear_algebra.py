"""Inverses, solutions and factors are those of torch; what looks at gradients is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture import capture
from piper.errors import CaptureError

Function = Callable[[Tensor], Tensor]
SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.tanh(self.first(x))))


X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def positive(x: Tensor) -> Tensor:
    """A positive definite matrix for each row, with different eigenvalues."""
    return x[:, :, None] * x[:, None] + torch.diag(torch.arange(1.0, 7.0, dtype=x.dtype))


FUNCTIONS: dict[str, Function] = {
    "inv": lambda x: torch.linalg.inv(positive(x)).sum(2),
    "inverse": lambda x: torch.inverse(positive(x)).sum(2),
    "solve": lambda x: torch.linalg.solve(positive(x), x),
    "solve matrix": lambda x: torch.linalg.solve(positive(x), x[:, None], left=False)[:, 0],
    "cholesky": lambda x: torch.linalg.cholesky(positive(x)).sum(2),
    "upper cholesky": lambda x: torch.linalg.cholesky(positive(x), upper=True).sum(2),
    "logdet": lambda x: x * torch.logdet(positive(x))[:, None],
    "eigh": lambda x: torch.linalg.eigh(positive(x))[0],
    "svd": lambda x: torch.linalg.svdvals(positive(x)),
    "qr": lambda x: torch.linalg.qr(positive(x))[1].sum(2),
    "pinv": lambda x: torch.linalg.pinv(positive(x)).sum(2),
    "lu solve": lambda x: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(positive(x)), x[:, :, None]
    )[:, :, 0],
}


def together(x: Tensor) -> Tensor:
    return torch.stack([function(x) for function in FUNCTIONS.values()]).mean(0)


def test_linear_algebra_trains_as_in_plain_pytorch() -> None:
    model = Net(together)
    batches, strategy = [(X, X), (X.flip(1), X)], [Place(where(), [0]), Split("MB", 2)]
    losses = plain_losses(SGD(model.parameters()), batches, lambda x, y: F.mse_loss(model(x), y))

    found = rehearse(Net(together), F.mse_loss, strategy, batches, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-9, atol=0)


def test_a_matrix_without_an_inverse_gives_nan() -> None:
    def singular(x: Tensor) -> Tensor:
        return x + torch.linalg.cholesky(-positive(x)).sum(2)

    assert rehearse(Net(singular), F.mse_loss, None, [(X, X)]).losses[0] != 0.0
    assert torch.tensor(rehearse(Net(singular), F.mse_loss, None, [(X, X)]).losses).isnan()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def differentiated(x: Tensor) -> Tensor:
    return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


REFUSED: dict[str, tuple[Any, str]] = {
    "a hook": (hooked, "it has a hook on gradients"),
    "a derivative": (differentiated, "the forward computes gradients itself"),
    "a check": (
        lambda x: x + torch.linalg.ldl_factor(positive(x.detach()))[0].sum(2),
        "checks the values",
    ),
    "residuals": (
        lambda x: torch.linalg.lstsq(positive(x), x[:, :, None]).solution[:, :, 0],
        r"write the solution as torch.linalg.pinv\(A\) @ B",
    ),
    "lazy": (nn.LazyLinear(6), "it is lazy: its shape is not known yet"),
    "compiled": (torch.compile(nn.Linear(6, 6)), "torch.compile has compiled it"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_trace_cannot_see_is_refused(function: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Net(function), F.mse_loss, (X, X))


def test_gradients_may_be_kept_for_nobody() -> None:
    def kept(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.retain_grad()
        return x

    capture(Net(kept), F.mse_loss, (X, X))
