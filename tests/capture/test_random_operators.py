"""Random operators draw the same numbers for the same samples under every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from draws import every, levels_of, one_of
from small_training import TWO
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Replicate, Split, annotate, rehearse, where
from piper.capture import capture, dropout_mask
from piper.capture.kernels import random_operators as ops
from piper.errors import CaptureError

Function = Callable[[Tensor], Tensor]
ROWS = 8
STRATEGIES = (
    [*TWO, Split("MB", 4)],
    [Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=1), Split("MB", 2)],
)


class Net(nn.Module):
    """Calls a function in both of its regions."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.function(torch.tanh(self.first(x)))
        with annotate("PP"):
            return self.last(self.function(x))


def attended(x: Tensor, **options: Any) -> Tensor:
    heads = x.view(-1, 2, 3, 1)
    return F.scaled_dot_product_attention(heads, 2 * heads, heads + 1, **options).reshape(x.shape)


def multihead(x: Tensor) -> Tensor:
    tokens = x.view(-1, 3, 2)
    weights = torch.eye(6, 2, dtype=x.dtype) + 0.1
    found, _ = F.multi_head_attention_forward(
        tokens.transpose(0, 1), tokens.transpose(0, 1), tokens.transpose(0, 1), 2, 2, weights,
        None, None, None, False, 0.3, torch.eye(2, dtype=x.dtype), None, need_weights=False,
    )  # fmt: skip
    return found.transpose(0, 1).reshape(x.shape)


FUNCTIONS: dict[str, Function] = {
    "rand": lambda x: x + torch.rand(x.shape[0], 6),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape),
    "randn_like": lambda x: x + torch.exp(0.5 * x) * torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid().detach()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "drop path": lambda x: x * x.new_empty((x.shape[0], 1)).bernoulli_(0.7).div_(0.7),
    "normal_": lambda x: x + torch.zeros_like(x).normal_(0, 2),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "gumbel": F.gumbel_softmax,
    "hard gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "distribution": lambda x: torch.distributions.Normal(x, x.abs() + 1).rsample(),
    "a sample": lambda x: x * torch.distributions.Normal(x, x.abs() + 1).sample(),
    "samples": lambda x: x + torch.distributions.Normal(0.5, 2.0).sample(x.shape).to(x.dtype),
    "normal": lambda x: x * torch.normal(x.detach(), x.detach().abs() + 1),
    "normal, one mean": lambda x: x + torch.normal(0.5, x.detach().abs() + 1),
    "normal, one deviation": lambda x: x + torch.normal(x.detach(), 0.3),
    "normal, a size": lambda x: x + torch.normal(1.0, 2.0, x.shape, dtype=x.dtype),
    "randint": lambda x: x * torch.randint(-2, 5, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 2, 5),
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.softmax(1), 3)).mean(1, True) * x,
    "multinomial, replaced": lambda x: (
        x.gather(1, torch.multinomial(x.softmax(1), 3, replacement=True)).mean(1, True) * x
    ),
    "mask": lambda x: torch.where(torch.rand(x.shape[0], 1) < 0.5, x, 2 * x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "dropout of channels": lambda x: F.dropout2d(x.view(-1, 3, 2, 1), 0.3).view(-1, 6),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(
        x.view(-1, 3, 2, 1), 0.3, training=True
    ).view(-1, 6),
    "attention": lambda x: attended(x, dropout_p=0.5),
    "causal attention": lambda x: attended(x, dropout_p=0.5, is_causal=True),
    "multihead": multihead,
    "numbers for all rows": lambda x: x * torch.rand([]) + torch.randn([]) + torch.randint(5, []),
    "noise for all rows": lambda x: x + torch.randn(6) * torch.rand(1) + torch.randn(2, 3).sum(),
    "as many as rows": lambda x: x + torch.randn(2).sum() * torch.randint(0, 5, (4, 1)).sum(),
    "one permutation": lambda x: x[:, torch.randperm(6)],
    "a coin for all rows": lambda x: x * torch.empty([], dtype=x.dtype).bernoulli_(0.5),
    "no layer drop": lambda x: x if torch.rand([]) < 0.0 else 2 * x,
}


LIKE: list[Function] = [
    torch.rand_like,
    torch.randn_like,
    lambda x: torch.randint_like(x, 5),
    lambda x: torch.empty_like(x).normal_(),
    lambda x: torch.zeros_like(x).uniform_(),
    lambda x: x.clone().exponential_(),
    lambda x: torch.empty_like(x).bernoulli_(0.5),
    lambda x: torch.bernoulli(x.sigmoid()),
    lambda x: torch.normal(x.detach(), 1.0),
    lambda x: F.dropout(x, 0.5),
    lambda x: F.dropout1d(x, 0.5),
    lambda x: F.rrelu(x, training=True),
]
TURNED: list[Callable[[Function], Function]] = [  # views of a result that lies in memory as x does
    lambda draw: lambda x: draw(x.view(-1, 3, 2).transpose(0, 1)).transpose(0, 1).reshape(-1, 6),
    lambda draw: lambda x: draw(x.view(-1, 3, 2).mT).mT.reshape(-1, 6),
    lambda draw: lambda x: draw(x.view(-1, 3, 2).permute(2, 0, 1)).permute(1, 2, 0).reshape(-1, 6),
    lambda draw: lambda x: draw(x.T).T.reshape(-1, 2, 3).flatten(1),
]


@pytest.mark.parametrize(
    ("turned", "draws"),
    [
        (TURNED[0], [LIKE[0], LIKE[1], LIKE[9]]),
        *(pytest.param(one, LIKE, marks=pytest.mark.soak) for one in TURNED),
    ],
)
def test_numbers_like_a_turned_tensor_lie_in_memory_as_it_does(
    turned: Callable[[Function], Function], draws: Sequence[Function]
) -> None:
    assert_independent_of_strategy(together([turned(draw) for draw in draws]))


SELECTED: dict[str, Function] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "another type": lambda x: torch.randn_like(x, dtype=torch.float32),
    "integers by hand": lambda x: (torch.rand_like(x) * 5).floor(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid().detach()),
}


def noisy(draw: Function, x: Tensor) -> Tensor:
    """Adds to the rows that a mask chooses: how many they are depends on values."""
    chosen = x[:, 0] > 0
    found = x.clone()
    found[chosen] = x[chosen] + draw(x[chosen]).to(x.dtype)
    return found


@one_of(2)
@pytest.mark.parametrize("kind", every(3, SELECTED))
def test_numbers_like_rows_that_a_mask_selects(kind: str) -> None:
    drawn = Net(partial(noisy, SELECTED[kind]))
    found = rehearse(drawn, F.mse_loss, None, data(), optimizer=torch.optim.SGD).losses
    still = Net(partial(noisy, torch.zeros_like))
    plain = rehearse(still, F.mse_loss, None, data(), optimizer=torch.optim.SGD).losses

    assert all(map(math.isfinite, found))
    assert all(one != other for one, other in zip(found, plain, strict=True))


def test_integers_like_rows_that_a_mask_selects_are_refused() -> None:
    model = Net(partial(noisy, lambda x: torch.randint_like(x, 5)))
    with pytest.raises(CaptureError, match=r"draws integers(?s:.*)torch.rand_like"):
        rehearse(model, F.mse_loss, None, data(), optimizer=torch.optim.SGD)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [(x, x) for x in draw]


def together(functions: Sequence[Function]) -> Function:
    """One function that calls all of them, so that a single capture tests many operators."""

    def called(x: Tensor) -> Tensor:
        return torch.stack([function(x) for function in functions]).mean(0)

    return called


GROUPS = [
    pytest.param(together([*FUNCTIONS.values()][k::16]), marks=pytest.mark.soak if k else ())
    for k in range(16)
]


def assert_independent_of_strategy(function: Function) -> None:
    sgd = torch.optim.SGD
    alone = rehearse(Net(function), F.mse_loss, [Place(where(), [0])], data(), optimizer=sgd)
    assert all(map(math.isfinite, alone.losses)) and len(set(alone.losses)) == 3
    for strategy in STRATEGIES:
        found = rehearse(Net(function), F.mse_loss, strategy, data(), optimizer=sgd)

        assert found.losses == pytest.approx(alone.losses, rel=1e-12)
        for name, tensor in found.parameters.items():
            torch.testing.assert_close(tensor, alone.parameters[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("function", GROUPS)
def test_every_strategy_draws_the_same_numbers(function: Function) -> None:
    assert_independent_of_strategy(function)


@pytest.mark.soak
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_strategy_draws_the_same_numbers_for_one_operator(function: Function) -> None:
    assert_independent_of_strategy(function)


def test_attention_with_dropout_is_attention_with_masked_weights() -> None:
    """Against autograd, with the masks that Piper documents."""
    numbers = iter(range(2))

    def plain(x: Tensor) -> Tensor:
        heads = x.view(-1, 2, 3, 1)
        scores = heads @ (2 * heads).transpose(-2, -1)
        hidden = torch.ones(3, 3).triu(1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        kept = dropout_mask(torch.tensor([0, 0, 1]), next(numbers), weights.shape, 0.5)
        return (weights * kept * 2 @ (heads + 1)).reshape(x.shape)

    model, (x, y) = Net(plain), data()[0]
    loss = F.mse_loss(model(x), y)
    loss.backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    found = rehearse(
        Net(FUNCTIONS["causal attention"]), F.mse_loss, STRATEGIES[0], data()[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )  # fmt: skip

    assert found.losses[0] == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(before[name] - found.parameters[name], parameter.grad)


def test_numbers_are_distributed_as_they_should_be() -> None:
    seed, shape = torch.tensor([3, 0, 1, 0]), [400, 500]
    like = torch.empty(shape)

    drawn = {
        "rand": (ops.RAND(seed, seed, 1, shape, torch.float32), 1 / 2, 1 / 12),
        "randn": (ops.RANDN(seed, seed, 1, shape, torch.float32), 0, 1),
        "exponential": (ops.EXPONENTIAL(like, seed, 1, 2.0), 1 / 2, 1 / 4),
        "randint": (ops.RANDINT(seed, seed, 1, 2, 6, shape, torch.int64).float(), 3.5, 5 / 4),
        "coin": (ops.COIN(like, seed, 1, 0.25), 1 / 4, 3 / 16),
    }

    for name, (found, mean, variance) in drawn.items():
        assert found.mean().item() == pytest.approx(mean, abs=0.01), name
        assert found.var().item() == pytest.approx(variance, rel=0.02), name
    weights = torch.tensor([[0.1, 0.2, 0.7]]).expand(20_000, 3)
    for replacement in (True, False):
        picked = ops.MULTINOMIAL(weights, seed, 1, 1, replacement).flatten()
        shares = torch.bincount(picked, minlength=3) / 20_000
        torch.testing.assert_close(shares, weights[0], atol=0.015, rtol=0)
    order = ops.RANDPERM(seed, seed, 1, 100, torch.int64)
    assert sorted(order.tolist()) == list(range(100)) != order.tolist()


NORMAL: dict[str, Function] = {
    "normal": lambda like: torch.normal(torch.full_like(like, 3.0), torch.full_like(like, 2.0)),
    "one mean": lambda like: torch.normal(3.0, torch.full_like(like, 2.0)),
    "a size": lambda like: torch.normal(3.0, 2.0, like.shape, dtype=like.dtype),
    "sample": lambda like: torch.distributions.Normal(torch.full_like(like, 3.0), 2.0).sample(),
}


@one_of(2)
@pytest.mark.parametrize(("name", "power"), levels_of(NORMAL, [2, 1]))
def test_normal_numbers_have_their_mean_and_deviation(name: str, power: int) -> None:
    batch = torch.zeros(2000, 10), torch.zeros(2000, 10)

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return (NORMAL[name](output.detach()) - 3).pow(power).mean() + 0 * output.mean()

    found = rehearse(nn.Linear(10, 10), loss, [Place(where(), [0])], [batch])

    assert found.losses[0] == pytest.approx([0, 4][power - 1], abs=0.1)


def captured(function: Function) -> Any:
    return capture(Net(function), F.mse_loss, data()[0])


def test_a_generator_of_its_own_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)

    with pytest.raises(CaptureError, match="a generator of its own"):
        captured(lambda x: x + torch.empty_like(x).normal_(generator=generator))
