"""A parameter has the options that a plain loop would give it, or the optimizer is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

import piper
from piper.errors import StrategyError
from piper.runtime.optimizers.whole_options import refuse_options_by_position
from piper.strategies import gpipe

Named = list[tuple[str, nn.Parameter]]
Make = Callable[[Any], torch.optim.Optimizer]

MODEL = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
PARAMETERS = dict(MODEL.named_parameters())
BUCKETS = [["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight", "2.bias"]]
ORDER = [*PARAMETERS]


def each(named: Named, option: Callable[[int, str, nn.Parameter], dict[str, Any]]) -> SGD:
    """One group for each parameter."""
    groups = [
        {"params": [one], **option(index, name, one)} for index, (name, one) in enumerate(named)
    ]
    return SGD(groups, lr=0.1)


class Scaled(SGD):
    """Its rate depends on how many parameters it has."""

    def __init__(self, params: Any, lr: float) -> None:
        given = list(params)
        super().__init__(given, lr=lr / len(given))


def first_group(named: Named) -> SGD:
    groups = [{"params": [named[0][1]], "lr": 0.01}, {"params": [one for _, one in named[1:]]}]
    return SGD([group for group in groups if group["params"]], lr=0.1)


def last_is_frozen(named: Named) -> SGD:
    return SGD([one for _, one in named[:-1]], lr=0.1)


def of_largest(named: Named) -> SGD:
    most = max(name for name, _ in named)
    return each(named, lambda i, name, p: {"lr": 0.01 if name == most else 0.1})


def needs_all(named: Named) -> SGD:
    known = dict(named)
    return SGD([{"params": [known.pop("0.weight")], "lr": 1.0}, {"params": [*known.values()]}])


BY_POSITION: dict[str, Make] = {
    "enumerate": lambda named: each(named, lambda i, n, p: {"lr": 0.1 * 0.7**i}),
    "every second": lambda named: each(named, lambda i, n, p: {"momentum": 0.9 * (i % 4 < 2)}),
    "from the end": lambda named: each(named, lambda i, n, p: {"lr": 1 / (len(named) - i)}),
    "number": lambda named: SGD(named, lr=1 / len(named)),
    "elements": lambda named: SGD(named, lr=1 / sum(one.numel() for _, one in named)),
    "a tensor": lambda named: SGD(named, lr=torch.tensor(1 / len(named))),
    "betas": lambda named: AdamW(named, betas=(0.5, 1 - 1 / len(named))),
    "a class of its own": partial(Scaled, lr=0.1),
    "the first": first_group,
    "the last": last_is_frozen,
    "the largest name": of_largest,
    "a flag": lambda named: SGD(named, lr=0.1, momentum=0.9, nesterov=len(named) > 2),
    "needs all": needs_all,
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_options_by_position_are_refused(name: str) -> None:
    with pytest.raises(StrategyError, match="once for each bucket of parameters"):
        refuse_options_by_position(BY_POSITION[name], None, PARAMETERS, BUCKETS)


def by_layer(named: Named) -> SGD:
    return each(named, lambda i, name, p: {"lr": 0.1 * 0.7 ** ORDER.index(name)})


def two_groups(named: Named) -> SGD:
    """As in most programs: an empty group stays away."""
    found = [[one for _, one in named if one.ndim > 1], [one for _, one in named if one.ndim < 2]]
    options = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    return SGD([{"params": p, **o} for p, o in zip(found, options, strict=True) if p], lr=0.1)


BY_NAME: dict[str, Make] = {
    "plain": partial(SGD, lr=0.1),
    "names": by_layer,
    "shapes": lambda named: each(named, lambda i, n, p: {"lr": 1 / p.numel()}),
    "values": lambda named: each(named, lambda i, n, p: {"lr": 0.1 + float(p.detach().std())}),
    "groups": two_groups,
    "without names": lambda named: SGD([one for _, one in named], lr=0.1),
    "one by one": lambda named: each(named, lambda i, n, p: {}),
    "fused": lambda named: AdamW(named, fused=True),
    "a rate as a tensor": lambda named: AdamW(named, lr=torch.tensor(0.1)),
    "an object": lambda named: each(named, lambda i, n, p: {"memory": object()}),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_options_by_name_are_allowed(name: str) -> None:
    refuse_options_by_position(BY_NAME[name], None, PARAMETERS, BUCKETS)


def halves_and_doubles(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A function for each group: which one a group gets depends on the groups before it."""
    functions = [lambda step: 0.5**step, lambda step: 2.0**step]
    return LambdaLR(optimizer, functions[: len(optimizer.param_groups)])


def by_number(optimizer: torch.optim.Optimizer) -> LRScheduler:
    many = sum(len(group["params"]) for group in optimizer.param_groups)
    return CosineAnnealingLR(optimizer, T_max=10 * many)


def by_state(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 / (1 + len(optimizer.state)))


def rates(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Needs two groups."""
    return OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=100)


def first_layer_apart(named: Named) -> SGD:
    found = [[p for n, p in named if n[0] == "0"], [p for n, p in named if n[0] != "0"]]
    return SGD([{"params": group} for group in found if group], lr=0.1)


def test_a_rate_that_all_calls_share_is_left_alone() -> None:
    rate = torch.tensor(0.1)
    make, schedule = partial(SGD, lr=rate), partial(LambdaLR, lr_lambda=lambda step: 0.9**step)

    refuse_options_by_position(make, schedule, PARAMETERS, BUCKETS)

    assert rate.item() == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [halves_and_doubles, by_number, by_state, rates])
def test_schedules_by_position_are_refused(
    schedule: Callable[[torch.optim.Optimizer], LRScheduler],
) -> None:
    with pytest.raises(StrategyError, match="once for each bucket of parameters"):
        refuse_options_by_position(first_layer_apart, schedule, PARAMETERS, BUCKETS)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(CosineAnnealingLR, T_max=10),
        partial(OneCycleLR, max_lr=0.2, total_steps=100),
        partial(LambdaLR, lr_lambda=lambda step: 0.9**step),
    ],
)
@pytest.mark.parametrize("name", BY_NAME)
def test_schedules_of_all_groups_are_allowed(
    name: str, schedule: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    refuse_options_by_position(BY_NAME[name], schedule, PARAMETERS, BUCKETS)


def test_a_job_is_refused_when_it_is_compiled() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    batch = torch.randn(4, 4), torch.randn(4, 4)
    given = model, nn.functional.mse_loss, gpipe(pp=2, microbatches=2), [batch]

    with pytest.raises(StrategyError) as refused:
        piper.rehearse(*given, optimizer=BY_POSITION["enumerate"])
    with pytest.raises(StrategyError, match="^lr_scheduler: it gives"):
        piper.rehearse(*given, optimizer=by_layer, lr_scheduler=by_number)

    assert str(refused.value) == (
        "optimizer: it gives 1.weight lr=0.048999999999999995 among all parameters, and lr=0.1 "
        "among those of its bucket: it is called once for each bucket of parameters\n"
        "  fix: choose options by the name and shape of a parameter, not by its position or by how "
        "many there are; or compute these before, from model.named_parameters()"
    )
    piper.rehearse(*given, optimizer=by_layer)
    whole = nn.Linear(4, 4), nn.functional.mse_loss, gpipe(pp=1, microbatches=2), [batch]
    piper.rehearse(*whole, optimizer=BY_POSITION["enumerate"])  # one bucket, as in a plain loop
