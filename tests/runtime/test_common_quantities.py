"""Optimizers whose updates depend on other parameters, if only late or seldom, are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import piper
from piper.errors import StrategyError
from piper.runtime.optimizers.joint_optimizers import refuse_common
from piper.runtime.optimizers.user_optimizer import make_checked, make_scheduler
from piper.runtime.state.sharded_optimizer import refuse_whole_tensors
from piper.strategies import gpipe

BUCKETS = [
    [("0.weight", nn.Parameter(torch.ones(3, 3))), ("0.bias", nn.Parameter(torch.ones(3)))],
    [("1.bias", nn.Parameter(torch.ones(3))), ("1.weight", nn.Parameter(torch.ones(3, 3)))],
]


class Own(Optimizer):
    """Its updates are those of `change`, one parameter after another."""

    def __init__(self, given: Any, lr: float = 0.1) -> None:
        super().__init__(given, {"lr": lr})

    def every(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.change(parameter, group["lr"])

    def change(self, p: nn.Parameter, lr: float) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=lr)


def gradients(optimizer: Own) -> list[Tensor]:
    return [one.grad for one in optimizer.every() if one.grad is not None]


class Prodigy(Own):
    """Its rate grows with the distance of all parameters to the start."""

    d, total = 1e-2, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        size = 0.0
        for one in self.every():
            state, grad = self.state[one], one.grad
            if not state:
                state.update(start=one.clone(), sum=torch.zeros_like(one))
            self.total += self.d**2 * float((grad * (state["start"] - one)).sum())
            state["sum"].add_(grad, alpha=self.d**2)
            size += float(state["sum"].abs().sum())
        if size > 0:
            self.d = max(self.d, self.total / size)
        for one in self.every():
            one.sub_(one.grad.sign(), alpha=self.d)  # type: ignore[union-attr]


class Skips(Own):
    limit = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if torch.stack([one.norm() for one in gradients(self)]).norm() < self.limit:
            super().step()


class SkipsNotFinite(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(bool(one.isfinite().all()) for one in gradients(self)):
            super().step()


class ClipsAt(Own):
    limit = 1e5

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        clip_grad_norm_(self.every(), self.limit)
        super().step()


class ClipsLate(Own):
    begins, steps = 4, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps > self.begins:
            clip_grad_norm_(self.every(), 0.05)
        super().step()


class ClipsLater(ClipsLate):
    begins = 500


class CountsInState(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.every():
            self.state[one]["step"] = self.state[one].get("step", 0) + 1
        if self.state[self.every()[0]]["step"] > 100:
            clip_grad_norm_(self.every(), 0.05)
        super().step()


class ClipsAtSmallRates(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["lr"] < 0.01:
            clip_grad_norm_(self.every(), 0.05)
        super().step()


class OnlyMatrices(Own):
    """Treats matrices together, and nothing else."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        clip_grad_norm_([one for one in self.every() if one.ndim == 2], 0.1)
        super().step()


class Largest(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        most = max(float(one.abs().max()) for one in gradients(self))
        for one in gradients(self):
            one.div_(max(1.0, most))
        super().step()


class Previous(Own):
    """A parameter is changed by the gradient of the one before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one, grad in zip(self.every()[1:], gradients(self), strict=False):
            one.sub_(grad.norm(), alpha=0.1)


def replaced(named: Any) -> Optimizer:
    """Of torch, with another step."""
    made = SGD(named, lr=0.1)
    inner = made.step

    def step(*args: Any) -> Any:
        clip_grad_norm_([p for group in made.param_groups for p in group["params"]], 0.1)
        return inner(*args)

    made.step = step  # type: ignore[method-assign]
    return made


def called_adamw(named: Any) -> Optimizer:
    class Named(AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
            return super().step(closure)

    Named.__name__, Named.__module__ = "AdamW", "torch.optim.adamw"
    return Named(named, lr=0.1)


TOGETHER: list[Callable[[Any], Optimizer]] = [
    Prodigy, Skips, SkipsNotFinite, ClipsAt, ClipsLate, ClipsLater, CountsInState,
    ClipsAtSmallRates, OnlyMatrices, Largest, Previous, replaced, called_adamw,
]  # fmt: skip


@one_of(3)
@pytest.mark.parametrize("make", TOGETHER)
def test_updates_that_depend_on_others_are_refused(make: Any) -> None:
    with pytest.raises(StrategyError, match="together differently than one by one"):
        refuse_common(make, BUCKETS)


class Lion(Own):
    def change(self, p: nn.Parameter, lr: float) -> None:
        assert p.grad is not None
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        p.sub_((0.9 * mean + 0.1 * p.grad).sign(), alpha=lr)
        mean.lerp_(p.grad, 0.01)


class Lars(Own):
    """A rate for each parameter, by norms that Python reads."""

    def change(self, p: nn.Parameter, lr: float) -> None:
        assert p.grad is not None
        weight, grad = p.norm().item(), p.grad.norm().item()
        if weight > 0 and grad > 0:
            p.sub_(p.grad, alpha=lr * min(weight / grad, 10.0))


class Muon(Own):
    """Matrices of one shape at once, each by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = [one for one in self.every() if one.ndim == 2]
        if found:
            x = torch.stack([one.grad for one in found])  # type: ignore[misc]
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                x = 1.5 * x - 0.5 * x @ x.mT @ x
            for one, change in zip(found, x, strict=True):
                one.sub_(change, alpha=self.param_groups[0]["lr"])


class Lookahead(Own):
    """Counts its steps, and goes back to slow weights."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.every():
            self.state[one].setdefault("slow", one.clone())
        super().step()
        self.steps += 1
        if self.steps % 5 == 0:
            for one in self.every():
                one.copy_(self.state[one]["slow"].lerp_(one, 0.5))


class Foreach(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = [one for one in self.every() if one.grad is not None]
        for one, norm in zip(found, torch._foreach_norm(gradients(self)), strict=True):
            one.sub_(one.grad / (norm + 1.0), alpha=0.1)  # type: ignore[operator]


class RefusesNan(Own):
    """Each parameter must have a finite gradient."""

    def change(self, p: nn.Parameter, lr: float) -> None:
        assert p.grad is not None and bool(p.grad.isfinite().all())
        super().change(p, lr)


def scheduled(named: Any) -> Optimizer:
    """torch's schedulers replace `step` of the optimizer, to count its calls."""
    made = SGD(named, lr=0.1)
    CosineAnnealingLR(made, T_max=10)
    return made


ALONE: list[Callable[[Any], Optimizer]] = [
    Own, Lion, Lars, Muon, Lookahead, Foreach, RefusesNan, partial(AdamW, lr=0.1), scheduled,
    partial(SGD, lr=0.1, momentum=0.9),
]  # fmt: skip


@one_of(3)
@pytest.mark.parametrize("make", ALONE)
def test_updates_of_each_parameter_alone_are_allowed(make: Any) -> None:
    refuse_common(make, BUCKETS)


LAYERS = [
    [(f"{k}.{name}", nn.Parameter(torch.ones(3, 2 + k))) for name in names]
    for k, names in enumerate((["weight", "lora_a"], ["weight", "lora_a"], ["lora_b"]))
]


class GroupClip(Own):
    """Clips some groups, each by its own norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group.get("clip"):
                clip_grad_norm_(group["params"], group["clip"])
        super().step()


def clipped(named: Any, chosen: str = "lora") -> Optimizer:
    groups: dict[bool, list[nn.Parameter]] = {}
    for name, one in named:
        groups.setdefault(chosen in name, []).append(one)
    return GroupClip([{"params": own, "clip": 0.05 * is_it} for is_it, own in groups.items()])


class Masked(Own):
    """Tensors of the parameters' own sizes."""

    def __init__(self, named: Any) -> None:
        named = list(named)
        super().__init__(named)
        sizes = {name: one.shape for bucket in LAYERS for name, one in bucket}
        self.masks = {one: torch.ones(sizes[name]) for name, one in named}

    def change(self, p: nn.Parameter, lr: float) -> None:
        super().change(p, lr)
        p.copy_(torch.where(self.masks[p].view(p.shape) > 0, p, 0.0))


class MaskedAndClipped(Masked):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        clip_grad_norm_(self.every(), 0.05)
        super().step()


@one_of(2)
@pytest.mark.parametrize("make", [clipped, partial(clipped, chosen="weight"), MaskedAndClipped])
def test_some_parameters_together_or_of_one_size_only(make: Any) -> None:
    with pytest.raises(StrategyError, match="updates parameters together differently"):
        refuse_common(make, LAYERS)


@pytest.mark.parametrize("make", [partial(clipped, chosen="2.lora"), Masked])
def test_groups_and_sizes_that_treat_each_parameter_alone(make: Any) -> None:
    refuse_common(make, LAYERS)


def test_one_bucket_may_be_treated_together() -> None:
    refuse_common(ClipsLate, BUCKETS[:1])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))


def test_a_job_with_several_buckets_is_refused() -> None:
    batch = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(StrategyError, match="Prodigy updates parameters together"):
        piper.rehearse(net(), mse_loss, gpipe(pp=2, microbatches=2), [batch], optimizer=Prodigy)
    piper.rehearse(net(), mse_loss, gpipe(pp=1, microbatches=2), [batch], optimizer=Prodigy)


@pytest.mark.parametrize("make", [replaced, called_adamw])
def test_shards_are_only_for_steps_of_torch(make: Any) -> None:
    with pytest.raises(StrategyError, match="may need whole parameters"):
        refuse_whole_tensors(make(BUCKETS[0]))


def test_schedulers_leave_an_optimizer_as_it_is() -> None:
    made = SGD(BUCKETS[0], lr=0.1)
    make_scheduler(partial(CosineAnnealingLR, T_max=10), made)
    refuse_whole_tensors(made)


def test_a_zero_grad_of_its_own_is_refused() -> None:
    def make(named: Any) -> Optimizer:
        made = SGD(named, lr=0.1)
        made.zero_grad = lambda *_: None  # type: ignore[method-assign]
        return made

    with pytest.raises(StrategyError, match="zero_grad was replaced"):
        make_checked(make, BUCKETS[0])
