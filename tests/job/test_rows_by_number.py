"""Rows that are taken by their number, in losses and models that are too large for a trial.

The number may be that of the rows of a microbatch, by chance; and microbatches may be unequal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, rehearse, where
from piper.errors import PiperError
from piper.job.loss import trial_size

WIDTH, ROWS = 4, 8
SGD = partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[Tensor, Tensor, int], Tensor]
LOSSES: dict[str, Loss] = {
    "first": lambda o, y, k: F.mse_loss(o[:k], y[:k]),
    "last": lambda o, y, k: F.mse_loss(o[-k:], y[-k:]),
    "narrow": lambda o, y, k: F.mse_loss(o.narrow(0, 0, min(k, len(o))), y[:k]),
    "summed": lambda o, y, k: F.mse_loss(o[:k], y[:k], reduction="sum"),
    "divided": lambda o, y, k: F.mse_loss(o[:k], y[:k], reduction="sum") / k,
    "split": lambda o, y, k: F.mse_loss(o.split(k)[0], y.split(k)[0]),
    "by numbers": lambda o, y, k: F.mse_loss(o[torch.arange(k)], y[torch.arange(k)]),
    "a mask of numbers": lambda o, y, k: (
        (o - y).square().mean(1) * (torch.arange(len(o)) < k)
    ).mean(),
    "beside the mean": lambda o, y, k: F.mse_loss(o, y) + o[:k].square().mean(),
    "squared": lambda o, y, k: F.mse_loss(o, y) + 0.1 * F.mse_loss(o[k:], y[k:], reduction="sum"),
}
MIXES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "an if": lambda h, k: h * 2 if len(h) > k else h,
    "divided by rows": lambda h, k: h / len(h) * k,
    "the first row": lambda h, k: h + h[:1],
    "the last row": lambda h, k: h * h[-1],
    "first rows": lambda h, k: torch.cat([h[:k].tanh(), h[k:]]),
    "turned": lambda h, k: h + h[torch.arange(len(h)).flip(0)],
    "nearest": lambda h, k: h + h[torch.cdist(h, h).argmin(1)] - h.T.reshape(h.shape),
    "a loop": lambda h, k: torch.stack([h[: i + 1].mean(0) for i in range(len(h))]),
    "a wrong view": lambda h, k: h.T.reshape(h.shape),
    "another wrong view": lambda h, k: h.view(-1, 2, 2).transpose(0, 1).reshape(h.shape),
}
SPLITS: dict[str, tuple[dict[str, object], int]] = {
    "2": ({"n": 2}, 1),
    "4": ({"n": 4}, 1),
    "5 and 3": ({"n": 2, "sizes": (5, 3)}, 1),
    "3": ({"n": 3}, 1),
    "2 of 2 replicas": ({"n": 2}, 2),
}


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_size, "LIMIT", 0)


def told(
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    name: str,
    caplog: pytest.LogCaptureFixture,
    **options: object,
) -> bool:
    """Whether it is refused or warned of."""
    split, replicas = SPLITS[name]
    x = torch.randn(ROWS * replicas, WIDTH, generator=torch.Generator().manual_seed(2))
    devices = list(range(replicas))
    strategy = [Place(where(), devices), Split("MB", **split)]  # type: ignore[arg-type]
    strategy += [Replicate(where(), devices)] if replicas > 1 else []
    try:
        rehearse(model, loss, strategy, [(x, x.tanh())], optimizer=SGD, **options)  # type: ignore
    except PiperError as error:
        assert "fix:" in str(error)
        return True
    return "accumulates gradients" in caplog.text


@one_of(5)
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("loss", every(2, LOSSES.values(), LOSSES))
def test_a_loss_of_some_rows_is_told(
    loss: Loss, k: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    assert told(model, lambda o, y: loss(o, y, k), name, caplog)


class Net(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(self.first(x)))


@one_of(5)
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("mix", every(2, MIXES.values(), MIXES))
def test_a_model_that_numbers_its_rows_is_told(
    mix: Callable[[Tensor, int], Tensor], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(Net(lambda h: mix(h, 4)), F.mse_loss, name, caplog)


@one_of(2)
@pytest.mark.parametrize("name", SPLITS)
def test_rows_that_stay_apart_are_left_in_peace(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not told(Net(torch.tanh), F.mse_loss, name, caplog)
