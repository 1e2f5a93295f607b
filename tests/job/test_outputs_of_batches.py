"""Models that return something of all rows beside them: a mean, or a number such as len(x)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, rehearse, strategies, where
from piper.errors import InputError
from piper.job.loss import trial_size

SGD = partial(torch.optim.SGD, lr=0.1)
Make = Callable[[Tensor, Tensor], Any]
Loss = Callable[[Any, Tensor], Tensor]
Case = tuple[Make, Loss]


class Net(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.make = nn.Linear(6, 4), make
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x), x)


def mean(h: Tensor, x: Tensor) -> Any:
    return h, h.mean()


def squares(o: Any, y: Tensor) -> Tensor:
    return (o[0] - y).square().sum()


BENT: dict[str, Case] = {
    "squared": (mean, lambda o, y: F.mse_loss(o[0], y) + o[1] ** 2),
    "times": (mean, lambda o, y: F.mse_loss(o[0], y) * o[1]),
    "divided": (mean, lambda o, y: F.mse_loss(o[0], y) / o[1]),
    "exp": (mean, lambda o, y: F.mse_loss(o[0], y) + o[1].exp()),
    "a share": (
        lambda h, x: (h, (x[:, 0] > 0).double().mean()),
        lambda o, y: F.mse_loss(o[0], y) / (o[1] + 0.5),
    ),
    "kept": (
        lambda h, x: (h, h.mean(0, keepdim=True)),
        lambda o, y: F.mse_loss(o[0], y) + o[1].square().mean(),
    ),
    "a number": (lambda h, x: (h, len(h)), lambda o, y: F.mse_loss(o[0], y) * o[1] ** 2),
    "a root": (lambda h, x: (h, len(h)), lambda o, y: squares(o, y) / o[1] ** 0.5),
}
MEANS: dict[str, Case] = {
    "a mean": (mean, lambda o, y: F.mse_loss(o[0], y) + o[1]),
    "numel": (lambda h, x: (h, h.numel()), lambda o, y: squares(o, y) / o[1]),
    "len": (lambda h, x: (h, len(x)), lambda o, y: squares(o, y) / o[1]),
    "inverse": (lambda h, x: (h, 1 / len(x)), lambda o, y: squares(o, y) * o[1]),
    "shape": (lambda h, x: (h, h.shape), lambda o, y: squares(o, y) / o[1][0]),
    "unused": (lambda h, x: (h, len(x)), lambda o, y: F.mse_loss(o[0], y)),
    "constant": (lambda h, x: (h, 3), lambda o, y: F.mse_loss(o[0], y) * o[1]),
    "a dict": (
        lambda h, x: {"h": h, "num_items": len(h)},
        lambda o, y: (o["h"] - y).square().sum() / o["num_items"],
    ),
}


@pytest.fixture(params=[False, True], ids=["small", "large"], autouse=True)
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(trial_size, "LIMIT", 0)


PARTS = {
    **{str(n): [Place(where(), [0]), Split("MB", n)] for n in (2, 4, 8)},
    "replicas": strategies.one_f_one_b(pp=1, dp=2, microbatches=2),
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, n, dtype=torch.float64, generator=draw) for n in (6, 4))
    return x, y


@one_of(8)
@pytest.mark.parametrize("parts", ["2", "4", "8"])
@pytest.mark.parametrize("case", every(3, [(case,) for case in BENT.values()], BENT))
def test_what_bends_a_mean_or_a_count_is_refused(case: Case, parts: str) -> None:
    make, loss = case

    with pytest.raises(InputError, match="fix:"):
        rehearse(Net(make), loss, PARTS[parts], [batch(0)], optimizer=SGD)


@one_of(8)
@pytest.mark.parametrize("parts", ["2", "8", "replicas"])
@pytest.mark.parametrize("case", every(3, [(case,) for case in MEANS.values()], MEANS))
def test_means_train_as_in_plain_pytorch_without_a_warning(
    case: Case, parts: str, caplog: pytest.LogCaptureFixture
) -> None:
    (make, loss), batches = case, [batch(seed) for seed in range(3)]
    plain = Net(make)
    wanted = plain_losses(SGD(plain.parameters()), batches, lambda x, y: loss(plain(x), y))

    found = rehearse(Net(make), loss, PARTS[parts], batches, optimizer=SGD)

    assert found.losses == pytest.approx(wanted, rel=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach(), rtol=1e-10, atol=0)
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
