"""Optimizers that a training loop keeps and changes between steps.

In plain PyTorch there is one optimizer, and it has the model's parameters. Here every bucket has
its own, with parameters whose memory and gradients plans know, and some were made for a trial only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from piper.errors import InputError
from piper.runtime.optimizers.own_parameters import WithAttributes
from piper.runtime.optimizers.parameter_groups import WithoutDecay
from piper.runtime.optimizers.seen_optimizers import (
    Options,
    Seen,
    Who,
    only_some,
    options_of,
    refuse_changed,
    refuse_partly_changed,
    refuse_partly_reset,
    seen,
)
from piper.runtime.torch_private import writes_of

LOOP = Who("optimizer", "your training loop", InputError)


@dataclass(frozen=True, eq=False)
class Noted:
    """Makes the user's optimizers, and knows which of them are still alive."""

    make: Any

    def __call__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> Any:
        made = self.make(named)
        if isinstance(made, torch.optim.Optimizer):
            _MADE.setdefault(self, WeakSet()).add(made)
        return made


_MADE: WeakKeyDictionary[Noted, WeakSet[torch.optim.Optimizer]] = WeakKeyDictionary()
Given = tuple[str, torch.Tensor, Any]  # an option that the user has, too, and its value
_GIVEN: WeakKeyDictionary[torch.optim.Optimizer, list[Given]] = WeakKeyDictionary()


def noted(make: Any) -> Any:
    """The same function, whose optimizers are known."""
    return make if inner(make) else Noted(make)


def as_given(make: Any) -> Any:
    return make.make if isinstance(make, Noted) else make


def inner(make: Any) -> Noted | None:
    while isinstance(make, WithoutDecay | WithAttributes):
        make = make.make
    return make if isinstance(make, Noted) else None


def made_by(make: Any) -> list[torch.optim.Optimizer]:
    """All that are still alive, also those of trials."""
    found = inner(make)
    return list(_MADE.get(found, ())) if found else []


def own_tensors(optimizer: torch.optim.Optimizer) -> None:
    """One tensor for several optimizers, such as a rate, would change for all."""
    for group in optimizer.param_groups:
        for key, one in [*group.items()]:
            if isinstance(one, torch.Tensor):
                _GIVEN.setdefault(optimizer, []).append((key, one, value_of(one)))
                group[key] = one.clone()


def value_of(option: torch.Tensor) -> Any:
    return writes_of(option) if option.is_cuda else option.tolist()


class KeptOptimizers:
    """Those that train, and those that a function made besides."""

    make: Any = None  # the user's function

    def __init__(self) -> None:
        self.live: list[Seen] = []  # after the last step
        self.others: list[tuple[torch.optim.Optimizer, tuple[Options, ...]]] = []
        self.given: list[Given] = []

    def look(self, live: Collection[torch.optim.Optimizer]) -> None:
        """After a step, after its schedulers, and after whatever else Piper does with them."""
        every, known = made_by(self.make), set(map(id, live))
        self.live = [seen(one) for one in live] if every else []
        self.others = [(one, tuple(options_of(one))) for one in every if id(one) not in known]
        self.given = [given for one in live for given in _GIVEN.get(one, ())]

    def refuse(self) -> None:
        """Before a step."""
        self.refuse_given()
        now = [seen(one.optimizer) for one in self.live]
        for old, new in zip(self.live, now, strict=True):
            refuse_changed(old, new, LOOP)
        refuse_partly_reset(self.live, now, LOOP)
        before, after = [one.options for one in self.live], [one.options for one in now]
        refuse_partly_changed(before, after, LOOP)
        if before == after:
            self.refuse_others()

    def refuse_others(self) -> None:
        """Nothing has changed in those that train."""
        for other, options in self.others:
            for old, new in zip(options, options_of(other), strict=False):
                if old != new:
                    raise only_some(old, new, LOOP)

    def refuse_given(self) -> None:
        for key, tensor, value in self.given:
            if value_of(tensor) != value:
                raise LOOP.error(
                    f"has written to the tensor that it gave as {key}: every optimizer has a copy",
                    "give lr_scheduler=..., or keep all optimizers that your function returns, and "
                    "change each of them",
                )
