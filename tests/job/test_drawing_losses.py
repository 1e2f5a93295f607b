"""Loss functions that draw random numbers for each row: they are means for any of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, Strategy, rehearse, where
from piper.errors import InputError

ROWS, LENGTH, WIDTH = 8, 3, 4
SGD = partial(torch.optim.SGD, lr=0.1)
STRATEGIES = {
    "microbatches": Strategy([Place(where(), [0]), Split("MB", 4)]),
    "replicas": Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)]),
    "unequal": Strategy([Place(where(), [0]), Split("MB", 2, sizes=[3, 1])]),
}
Loss = Callable[[Tensor, Tensor], Tensor]


def errors(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).square().mean(-1)


def masked_rows(o: Tensor, y: Tensor) -> Tensor:
    m = (torch.rand(o.shape[:2]) < 0.5).to(o.dtype)
    return ((errors(o, y) * m).sum(1) / m.sum(1).clamp(min=1)).mean()


def timed(o: Tensor, y: Tensor) -> Tensor:
    """As in diffusion, where a table says how much noise a row gets."""
    share = torch.linspace(0.1, 0.9, 10, dtype=o.dtype)[torch.randint(0, 10, (len(o),))]
    noisy = share[:, None, None] * y + torch.randn_like(y)
    return F.mse_loss(o, noisy)


LOSSES: dict[str, Loss] = {
    "noise": lambda o, y: (o - y - torch.randn_like(o)).square().mean(),
    "masked rows": masked_rows,
    "timed": timed,
    "weights": lambda o, y: (errors(o, y) * torch.rand(len(o), 1)).mean(),
    "labels dropped": lambda o, y: F.l1_loss(o, y * torch.bernoulli(torch.full_like(y, 0.7))),
    "a sum": lambda o, y: (errors(o, y) * torch.rand_like(o[..., 0])).sum(),
    "in place": lambda o, y: (o - y.clone().uniform_(-1, 1)).abs().mean(),
}


def neighbours(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o, y[torch.randint(0, len(y), (len(y),))])


def weighed(o: Tensor, y: Tensor) -> Tensor:
    w = torch.rand(len(o), 1)
    return (errors(o, y) * w / w.mean()).mean()


NO_MEANS: dict[str, Loss] = {
    "neighbours": neighbours,
    "weighed": weighed,
    "counted": lambda o, y: errors(o, y)[torch.rand(o.shape[:2]) < 0.5].mean(),
    "sorted": lambda o, y: (errors(o, y) * torch.rand(len(o), 1).sort(0).values).mean(),
    "tokens first": lambda o, y: F.mse_loss(o.T, y.T + torch.randn_like(y.T)),
}


def data(seed: int) -> tuple[Tensor, Tensor]:
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return draw(ROWS, LENGTH, WIDTH), draw(ROWS, LENGTH, WIDTH)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH).double()


WAYS = [(loss, one) for loss in LOSSES for one in STRATEGIES]


@one_of(3)
@pytest.mark.parametrize(("loss", "strategy"), every(4, WAYS))
def test_they_train_as_on_one_device(loss: str, strategy: str) -> None:
    batches = [data(seed) for seed in range(3)]

    one = rehearse(model(), LOSSES[loss], None, batches, optimizer=SGD)
    found = rehearse(model(), LOSSES[loss], STRATEGIES[strategy], batches, optimizer=SGD)

    assert found.losses == pytest.approx(one.losses, rel=1e-10)
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, rtol=1e-9, atol=1e-12)


@one_of(2)
@pytest.mark.parametrize("loss", NO_MEANS)
def test_what_is_no_mean_for_some_numbers_is_refused(loss: str) -> None:
    with pytest.raises(InputError, match="cannot see in its graph"):
        rehearse(model(), NO_MEANS[loss], STRATEGIES["microbatches"], [data(0)], optimizer=SGD)
