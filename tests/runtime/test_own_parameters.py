"""Groups by what a parameter is: its attributes are known, its identity is refused."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

import piper
from piper.errors import StrategyError
from piper.runtime.optimizers.whole_options import refuse_options_by_position
from piper.strategies import gpipe

Named = list[tuple[str, nn.Parameter]]


class Special(nn.Parameter):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.gain = Special(torch.ones(4, dtype=torch.float64))
        self.head.weight = nn.Parameter(self.head.weight.detach().t())  # not contiguous
        self.head.weight._no_weight_decay = True  # type: ignore[attr-defined]
        self.body.bias._optim = {"lr": 0.5, "weight_decay": 0.0}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)) * self.gain)


def chosen(named: Named, is_chosen: Callable[[str, nn.Parameter], bool], **options: Any) -> SGD:
    """Some parameters have options of their own."""
    found: tuple[list[Any], list[Any]] = [], []
    for name, parameter in named:
        found[is_chosen(name, parameter)].append(parameter)
    groups = [{"params": found[0]}, {"params": found[1], **(options or {"lr": 0.01})}]
    return SGD([one for one in groups if one["params"]], lr=0.2, weight_decay=0.1)


def by_ids(net: Net) -> Any:
    ids = set(map(id, net.head.parameters()))
    return lambda named: chosen(named, lambda n, p: id(p) in ids)


def by_set(net: Net) -> Any:
    own = set(net.head.parameters())
    return lambda named: chosen(named, lambda n, p: p in own)


def by_names_of_ids(net: Net) -> Any:
    names = {id(p): name for name, p in net.named_parameters()}
    return lambda named: chosen(named, lambda n, p: names.get(id(p), "").startswith("head"))


def only_own(net: Net) -> Any:
    return lambda named: SGD([p for _, p in named if any(p is q for q in net.parameters())], lr=0.1)


def others_only(net: Net) -> Any:
    return lambda named: SGD([p for _, p in named if p is not net.head.weight], lr=0.1)


BY_IDENTITY: dict[str, Callable[[Net], Any]] = {
    "ids": by_ids,
    "set": by_set,
    "names of ids": by_names_of_ids,
    "only own": only_own,
    "all but one": others_only,
    "is": lambda net: lambda named: chosen(named, lambda n, p: p is net.head.weight),
    "class": lambda net: lambda named: chosen(named, lambda n, p: isinstance(p, Special)),
    "type": lambda net: lambda named: chosen(named, lambda n, p: type(p) is not nn.Parameter),
    "contiguous": lambda net: lambda named: chosen(named, lambda n, p: p.is_contiguous()),
    "strides": lambda net: lambda named: chosen(named, lambda n, p: p.stride()[-1] > 1),
    "decay": lambda net: (
        lambda named: chosen(named, lambda n, p: p is net.head.bias, weight_decay=0.0)
    ),
    "AdamW": lambda net: (
        lambda named: AdamW(
            [{"params": [p], "lr": 0.1 if p is net.gain else 0.2} for _, p in named]
        )
    ),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", BY_IDENTITY)
def test_groups_by_identity_are_refused(name: str, many: bool) -> None:
    net = Net()
    parameters = dict(net.named_parameters())
    buckets = [["body.weight", "body.bias"], ["head.weight", "head.bias", "gain"]]
    given = buckets if many else [[one for bucket in buckets for one in bucket]]
    with pytest.raises(StrategyError, match="compare names|freeze what must not"):
        refuse_options_by_position(BY_IDENTITY[name](net), None, parameters, given)


def test_a_job_is_refused_also_with_one_bucket() -> None:
    net, batch = Net(), torch.randn(2, 4, 4, dtype=torch.float64)
    with pytest.raises(StrategyError) as refused:
        piper.Trainer(net, mse_loss, example=tuple(batch), optimizer=by_ids(net))
    assert str(refused.value).startswith(
        "optimizer: head.weight has lr=0.01 if it is the model's own, and lr=0.2 if it only looks "
        "the same: the function is given parameters of Piper"
    )


def of_s4(named: Named) -> SGD:
    """A group for each set of options, as in the code of S4 and Mamba."""
    return SGD([{"params": [p], **getattr(p, "_optim", {})} for _, p in named], lr=0.2)


def without_decay(named: Named) -> SGD:
    return chosen(named, lambda n, p: hasattr(p, "_no_weight_decay"), weight_decay=0.0)


def sets_and_reads(named: Named) -> SGD:
    """Attributes that the function sets itself."""
    for name, parameter in named:
        parameter.slow = "bias" in name  # type: ignore[attr-defined]
    return chosen(named, lambda n, p: p.slow)  # type: ignore[attr-defined]


class ReadsInStep(SGD):
    """An optimizer whose step reads an attribute of each parameter."""

    elementwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        few = 0.5 if hasattr(one, "_no_weight_decay") else 1.0
                        one.sub_(one.grad, alpha=few * group["lr"])


ZERO = gpipe(pp=1, dp=2, zero=1, microbatches=1)
STRATEGIES = {
    "one": None,
    "pp": gpipe(pp=2, microbatches=2),
    "zero": gpipe(pp=1, dp=2, zero=1, microbatches=1),
}


MAKERS = [of_s4, without_decay, sets_and_reads, partial(ReadsInStep, lr=1)]


@one_of(2)
@pytest.mark.parametrize(("make", "strategy"), every(2, product(MAKERS, STRATEGIES)))
def test_groups_by_attributes_train_as_in_a_plain_loop(make: Any, strategy: str) -> None:
    made = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randn(2, 4, 4, generator=made, dtype=torch.float64)) for _ in range(2)]
    rehearsed = piper.rehearse(Net(), mse_loss, STRATEGIES[strategy], batches, optimizer=make)
    plain = Net()
    optimizer = make(list(plain.named_parameters()))
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(plain(x), y).backward()
        optimizer.step()
    for name, one in plain.state_dict().items():
        torch.testing.assert_close(rehearsed.parameters[name], one, rtol=0, atol=1e-12)


def test_the_model_stays_as_it_is() -> None:
    net = Net()

    def freezes(named: Named) -> SGD:
        for _, parameter in named:
            parameter.requires_grad_(False)
            parameter.seen = True  # type: ignore[attr-defined]
        return SGD(named, lr=0.1)

    parameters = dict(net.named_parameters())
    refuse_options_by_position(freezes, None, parameters, [[*parameters]])
    assert all(one.requires_grad for one in net.parameters())
    assert not any(hasattr(one, "seen") for one in net.parameters())
