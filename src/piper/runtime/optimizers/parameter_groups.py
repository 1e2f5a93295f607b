"""Parameter groups: those without weight decay, by name, and options that a loop changes in some.

In plain PyTorch there is one optimizer. Here every bucket of parameters has its own, so a loop that
keeps what its function has made last, and sets its rate, changes that of some parameters only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from piper.errors import InputError
from piper.runtime.optimizers.known_optimizers import is_torchs

Options = tuple[tuple[str, Any], ...]  # of one group of parameters
PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class WithoutDecay:
    """Makes the user's optimizer with two groups: the second one has no weight decay."""

    make: Any
    patterns: tuple[str, ...]

    def __call__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        every = list(named)
        bare = [pair for pair in every if is_named(pair[0], self.patterns)]
        decayed = [pair for pair in every if not is_named(pair[0], self.patterns)]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": bare, "weight_decay": 0.0}]
        return self.make([group for group in groups if group["params"]])


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name has one of the patterns in it, in any case. * stands for any text.

    >>> is_named("layers.0.input_layernorm.weight", ["bias", "norm"])
    True
    >>> is_named("layers.0.mlp.weight", ["bias", "norm"]), is_named("a.b.bias", ["a*bias"])
    (False, True)
    """
    return any(fnmatchcase(name.lower(), f"*{pattern.lower()}*") for pattern in patterns)


def options_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Options]:
    """Of all groups of optimizers that do not change them in a step, as torch's do not."""
    return [
        tuple((key, one) for key, one in group.items() if is_plain(one))
        for optimizer in optimizers
        if is_torchs(type(optimizer))
        for group in optimizer.param_groups
    ]


def is_plain(value: Any) -> bool:
    """Whether it can be compared without reading a tensor, such as betas."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def refuse_partly_changed(before: Sequence[Options], now: Sequence[Options]) -> None:
    """Groups with equal options must still have equal ones."""
    if len(before) != len(now) or before == now:
        return
    found: dict[Options, Options] = {}
    for old, new in zip(before, now, strict=True):
        known = found.setdefault(old, new)
        if known != new:
            key, value = next(one for one in (*known, *new) if one not in old)
            raise InputError.of(
                "optimizer",
                f"your training loop has set {key}={value} in some optimizers only: every bucket "
                "of parameters has its own",
                "give lr_scheduler=..., or keep all optimizers that your function returns, and "
                "change each of them",
            )
