"""The loss of Gaussians, as torch computes it, though a trace cannot look at its variances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import every
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, where
from piper.capture.trace.replaced.calls import ReplacedCalls

ROWS, FEATURES = 8, 3
Variance = Callable[[Tensor], Tensor]
VARIANCES: dict[str, Variance] = {
    "for each": lambda v: v,
    "for each row": lambda v: v[:, :1],
    "for each row, without a dimension": lambda v: v[:, 0],
    "for each column": lambda v: v[:1],
    "too small": lambda v: v * 1e-8,
    "zero": lambda v: (v - 1).relu(),
    "infinite": lambda v: v.masked_fill(v > 1.5, float("inf")),
}
OPTIONS = [
    {},
    {"full": True},
    {"eps": 0.4},
    {"reduction": "sum"},
    {"reduction": "none", "full": True, "eps": 1.0},
]


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    input, target, var = torch.randn(3, ROWS, FEATURES, dtype=torch.float64, generator=draw)
    return input.requires_grad_(), target, var.exp().requires_grad_()


def outcome(name: str, seed: int, options: dict[str, object]) -> list[Tensor]:
    """The loss, and its gradients."""
    input, target, var = drawn(seed)
    loss = F.gaussian_nll_loss(input, target, VARIANCES[name](var), **options)  # type: ignore[arg-type]
    return [loss, *torch.autograd.grad(loss.sum(), [input, var])]


@pytest.mark.parametrize("name", VARIANCES)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    for seed, options in enumerate(OPTIONS):
        right = outcome(name, seed, options)
        with ReplacedCalls():
            found = outcome(name, seed, options)

        torch.testing.assert_close(found, right, rtol=1e-14, atol=0, equal_nan=True)


def test_wrong_sizes_and_reductions_are_errors_as_in_torch() -> None:
    input, target, var = drawn(0)
    for one in (var[:4], var[:, :2], var[0], var.unsqueeze(0)):
        with pytest.raises(ValueError, match="incorrect size"), ReplacedCalls():
            F.gaussian_nll_loss(input, target, one)
    with pytest.raises(ValueError, match="not valid"), ReplacedCalls():
        F.gaussian_nll_loss(input, target, var, reduction="most")


def test_a_negative_variance_gives_no_number() -> None:
    """An error in torch: training must not go on as if it were small."""
    input, target, var = drawn(0)
    with ReplacedCalls():
        found = F.gaussian_nll_loss(input, target, var - 1)

    assert found.isnan()


class Heads(nn.Module):
    def __init__(self, variance: Variance) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.spread = (nn.Linear(FEATURES, FEATURES).double() for _ in range(2))
        self.variance = variance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.variance(F.softplus(self.spread(x)))


LOSSES: dict[str, tuple[Variance, nn.Module]] = {
    "for each": (VARIANCES["for each"], nn.GaussianNLLLoss()),
    "sum": (VARIANCES["for each row"], nn.GaussianNLLLoss(full=True, reduction="sum")),
    "too small": (VARIANCES["too small"], nn.GaussianNLLLoss(eps=1e-3)),
}


@pytest.mark.parametrize(("variance", "criterion"), every(2, LOSSES.values(), LOSSES))
def test_training_is_that_of_plain_pytorch(variance: Variance, criterion: nn.Module) -> None:
    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        found: Tensor = criterion(output[0], target, output[1])
        return found

    plain = Heads(variance)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    batches = [tuple(one.detach() for one in drawn(seed)[:2]) for seed in range(3)]
    losses = plain_losses(optimizer, batches, lambda x, y: loss_fn(plain(x), y))

    strategy = [Place(where(), [0]), Split("MB", 2)]
    found = rehearse(Heads(variance), loss_fn, strategy, batches, optimizer=sgd)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, one in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], one.detach(), rtol=1e-12, atol=1e-12)


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-3)  # type: ignore[arg-type]
