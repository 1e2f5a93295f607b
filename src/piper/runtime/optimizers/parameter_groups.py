"""Parameter groups: those without weight decay, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from piper.errors import InputError


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
        try:
            return self.make([group for group in groups if group["params"]])
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            what = f"the optimizer function fails on two groups of parameters: {error}"
            fix = "leave out no_decay, and make the group with weight_decay=0 in the function"
            raise InputError.of("no_decay", what, fix) from error


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name has one of the patterns in it, in any case. * stands for any text.

    >>> is_named("layers.0.input_layernorm.weight", ["bias", "norm"])
    True
    >>> is_named("layers.0.mlp.weight", ["bias", "norm"]), is_named("a.b.bias", ["a*bias"])
    (False, True)
    """
    return any(fnmatchcase(name.lower(), f"*{pattern.lower()}*") for pattern in patterns)
