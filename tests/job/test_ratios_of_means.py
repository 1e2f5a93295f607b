"""Means that are divided by means over rows: microbatches of several sizes have exact weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn

from piper import Place, Split, Trainer, rehearse, where
from piper.errors import InputError
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of errors, labels and a mask
LOSSES: dict[str, Loss] = {
    "a masked mean": lambda e, y, m: (e * m).mean() / m.mean(),
    "normalised": lambda e, y, m: e.mean() / y.square().mean(),
    "beside a constant": lambda e, y, m: (e * m).mean() / (m.mean() + 1),
    "nearly zero": lambda e, y, m: (e * m).mean() / (m.mean() + 1e-8),
    "means of rows": lambda e, y, m: (e * m).mean(1).mean() / m.mean(1).mean(),
    "a sum of means": lambda e, y, m: ((e * m).mean(0) / m.mean()).sum(),
    "by the size": lambda e, y, m: (e * m).mean() / (m.sum() / m.numel()),
    "sums of rows": lambda e, y, m: (e * m).sum(1).mean() / m.sum(1).mean(),
    "how many": lambda e, y, m: (e * m).mean() / (m > 0).double().mean(),
    "weights of rows": lambda e, y, m: (e.mean(1) * m[:, 0]).mean() / m[:, 0].mean(),
    "twice": lambda e, y, m: (e * m).mean() / (2 * m.mean()),
    "times the inverse": lambda e, y, m: (e * m).sum() * (1 / m.sum()),
    "inverse first": lambda e, y, m: 1 / m.sum().clamp(min=1) * (e * m).sum(),
    "how many are not zero": lambda e, y, m: (e * m.bool()).sum() / m.count_nonzero(),
    "at least one": lambda e, y, m: (e * (m > 0)).sum() / torch.count_nonzero(m).clamp(min=1),
    "of a root": lambda e, y, m: e.mean() / y.mean(1).square().mean(),
}
STRATEGIES = {
    "three parts": [Place(where(), [0]), Split("MB", 3)],
    "given sizes": [Place(where(), [0]), Split("MB", 2, sizes=[3, 5])],
    "unequal replicas": one_f_one_b(pp=1, dp=2, microbatches=1, replica_sizes=[3, 5]),
    "two parts": [Place(where(), [0]), Split("MB", 2)],
}
CASES = [(loss, one) for loss in LOSSES for one in STRATEGIES]


class Own(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(4, 3).double(), loss

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return self.loss((self.layer(x) - y).square(), y, m)


def batches(rows: int = 8) -> list[tuple[Tensor, Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)

    def one() -> tuple[Tensor, Tensor, Tensor]:
        x, y = (torch.randn(rows, n, generator=draw).double() for n in (4, 3))
        m = (torch.rand(rows, 3, generator=draw) > torch.linspace(0.1, 0.8, rows)[:, None]).double()
        m[:, 0] = torch.rand(rows, generator=draw)
        return x, y, m

    return [one() for _ in range(3)]


def plain(loss: Loss) -> tuple[list[float], nn.Module]:
    model = Own(loss)
    optimizer, losses = SGD(model.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        found = model(*batch)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses, model


@one_of(5)
@pytest.mark.parametrize(("name", "strategy"), every(3, CASES, map(", ".join, CASES)))
def test_a_models_own_loss_is_that_of_the_whole_batch(name: str, strategy: str) -> None:
    losses, model = plain(LOSSES[name])

    found = rehearse(Own(LOSSES[name]), None, STRATEGIES[strategy], batches(), optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for key, tensor in model.named_parameters():
        torch.testing.assert_close(found.parameters[key], tensor.detach(), rtol=1e-10, atol=1e-12)


@one_of(2)
@pytest.mark.parametrize("name", every(4, LOSSES))
def test_so_is_a_loss_function(name: str) -> None:
    def loss_fn(output: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        y, m = labels
        return LOSSES[name]((output - y).square(), y, m)

    losses, model = plain(LOSSES[name])
    given = [(x, (y, m)) for x, y, m in batches()]

    strategy = STRATEGIES["three parts"]
    found = rehearse(Own(LOSSES[name]).layer, loss_fn, strategy, given, optimizer=SGD)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(found.parameters["weight"], model.layer.weight.detach())


EVALUATED: dict[str, Loss] = {
    "a masked mean": LOSSES["a masked mean"],
    "times the size": lambda e, y, m: (e * m).mean() * m.numel() / m.sum(),
    "twice": lambda e, y, m: 2 * (e * m).sum() / m.sum(),
    "half": lambda e, y, m: (e * m).sum() / (2 * m.sum()),
    "a part of a sum": lambda e, y, m: 0.1 * e.sum(),
    "two sums": lambda e, y, m: e.sum() + 0.1 * e.abs().sum(),
    "a loop": lambda e, y, m: sum((e[:, k] * m[:, k]).sum() for k in range(3)) / m.sum(),
    "by rows": lambda e, y, m: (e * m).sum(1).mean() / (m.sum() / len(e)),
}


@one_of(2)
@pytest.mark.parametrize("name", every(3, EVALUATED))
def test_batches_that_are_evaluated_count_by_what_they_divide_by(name: str) -> None:
    model, (whole, *_) = Own(EVALUATED[name]), batches(11)
    example, rest = (tuple(one[part] for one in whole) for part in (slice(8), slice(8, 11)))

    with Trainer(model, None, None, example=example, device="cpu") as trainer:
        found = trainer.evaluate([example, rest])

    assert found.loss == pytest.approx(model(*whole).item(), rel=1e-12)


@one_of(2)
@pytest.mark.parametrize("name", every(3, EVALUATED))
def test_a_batch_is_evaluated_as_it_is_trained(name: str) -> None:
    model, (whole, *_) = Own(EVALUATED[name]), batches()

    with Trainer(model, None, STRATEGIES["two parts"], example=whole, device="cpu") as trainer:
        found = trainer.evaluate([whole])

    assert found.loss == pytest.approx(model(*whole).item(), rel=1e-12)


CUT_OFF: dict[str, Loss] = {
    "a sum": lambda e, y, m: (e * m).sum() / m.sum().long(),
    "beside what is not finite": lambda e, y, m: (
        (e * m).sum() / m.sum().long() + 0 * (y.square() + 1).log().sum()
    ),
    "a mean": lambda e, y, m: e.mean() / (m * 100).mean().long(),
}


@one_of(2)
@pytest.mark.parametrize("name", CUT_OFF)
def test_a_sum_that_loses_its_fraction_is_exact_or_refused(name: str) -> None:
    loss = CUT_OFF[name]
    losses, _ = plain(loss)
    try:
        found = rehearse(Own(loss), None, STRATEGIES["three parts"], batches(), optimizer=SGD)
    except InputError:
        return

    assert found.losses == pytest.approx(losses, rel=1e-12)
