"""Optimizers that look at several parameters at once are refused: each bucket has its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from replicas import Net, data
from torch.nn import functional

from piper import Place, Split, rehearse, strategies, where
from piper.errors import StrategyError

ONE = [Place(where(), [0])]
TWO = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]


class Clipping(torch.optim.SGD):
    """Clips by the norm of all that it has."""

    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 0.1)
        super().step(closure)


class Signs(torch.optim.Optimizer):
    """By the sign of each element; matrices by half."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign() * (0.5 if p.dim() > 1 else 1.0)


def by_name(named: Any) -> Signs:
    """Knows no names but those of the model."""
    rates = {"first.weight": 0.1, "first.bias": 0.2, "last.weight": 0.3, "last.bias": 0.4}
    return Signs([{"params": [p], "lr": rates[name]} for name, p in named], lr=0.1)


def test_one_that_clips_for_itself_is_refused() -> None:
    with pytest.raises(StrategyError) as refused:
        rehearse(Net(), functional.mse_loss, ONE, data(), optimizer=partial(Clipping, lr=0.1))

    assert str(refused.value) == (
        "optimizer: Clipping updates parameters together differently than one by one, and every "
        "bucket of parameters has its own optimizer\n"
        "  fix: look at one parameter at a time; to clip by the norm of all gradients, give "
        "Trainer(max_norm=...)"
    )


class Langevin(torch.optim.SGD):
    """SGLD: noise beside each gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p += 0.1 * torch.randn_like(p)


@pytest.mark.parametrize("strategy", [ONE, TWO], ids=["one bucket", "two buckets"])
def test_one_that_draws_numbers_is_told_so(strategy: Any) -> None:
    with pytest.raises(StrategyError, match="Langevin gives other values for the same gradients"):
        rehearse(Net(), functional.mse_loss, strategy, data(), optimizer=partial(Langevin, lr=0.1))


STEPS = {"global": 0}


class Counting(torch.optim.SGD):
    """Takes smaller and smaller steps. The count belongs to the class, or to nobody."""

    where = "class"
    count = 0
    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.where == "class":
            type(self).count += 1
        else:
            STEPS["global"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] / (type(self).count + STEPS["global"]) * p.grad


@one_of(2)
@pytest.mark.parametrize("strategy", [ONE, TWO], ids=["one bucket", "two buckets"])
@pytest.mark.parametrize("where", ["class", "global"])
@pytest.mark.parametrize("kind", [Counting, Langevin])
def test_what_says_that_it_is_elementwise_counts_and_draws_by_itself(
    kind: type[torch.optim.SGD], where: str, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "where", where)
    monkeypatch.setattr(Langevin, "elementwise", True, raising=False)

    with pytest.raises(StrategyError, match="gives other values for the same gradients"):
        rehearse(Net(), functional.mse_loss, strategy, data(), optimizer=partial(kind, lr=0.1))


def test_noise_in_the_loss_is_noise_in_the_gradients() -> None:
    def loss(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, wanted)

    class Noisy(Net):
        def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            noise = sum((torch.randn_like(p) * p).sum() for p in self.parameters())
            return loss(super().forward(x), wanted) + 0.1 * noise

    made = [
        rehearse(Noisy(), None, strategy, data(), optimizer=partial(torch.optim.SGD, lr=0.1))
        for strategy in (ONE, [*ONE, Split("MB", 2)])
    ]

    plain = rehearse(Net(), loss, ONE, data(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for name, tensor in made[0].parameters.items():
        torch.testing.assert_close(made[1].parameters[name], tensor)
        assert not torch.allclose(plain.parameters[name], tensor)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            strategies.one_f_one_b(pp=1, microbatches=2, tp=2),
            r"`Shard` \(tp=, ep=\) gives it a part",
        ),
        (strategies.one_f_one_b(pp=1, microbatches=2, dp=2, zero=2), "zero=1, 2 and 3 give it"),
    ],
    ids=["tp", "zero"],
)
def test_one_of_whole_parameters_is_told_what_divides_them(strategy: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        rehearse(Net(), functional.mse_loss, strategy, data(), optimizer=partial(Signs, lr=0.1))


@pytest.mark.parametrize("make", [partial(Signs, lr=0.1), by_name], ids=["signs", "by name"])
def test_one_by_one_is_exact(make: Any) -> None:
    model = Net()
    optimizer = make(list(model.named_parameters()))
    for x, y in data():
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    found = rehearse(Net(), functional.mse_loss, ONE, data(), optimizer=make)

    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], parameter.detach())
