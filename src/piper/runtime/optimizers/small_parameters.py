"""Small parameters for a trial, and gradients that are the same in every trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from piper.runtime.optimizers.known_optimizers import MakeOptimizer, Named

Parameters = list[torch.nn.Parameter]
LARGE = 2**18  # elements of parameters that are not tried as they are


@dataclass(frozen=True, slots=True)
class Kind:
    """A parameter of a trial: small, or as it is."""

    name: str
    dims: int
    shape: tuple[int, ...] = ()  # as it is
    whole: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shape if self.whole else (2,) * self.dims


def kind(name: str, parameter: torch.Tensor) -> Kind:
    return Kind(name, parameter.dim(), tuple(parameter.shape))


def fitting(make: MakeOptimizer, kinds: Sequence[Kind]) -> list[Kind]:
    """The same, as they are if the optimizer cannot step on small ones, say for a mask's shape."""
    given = list(kinds)
    whole = [replace(one, whole=True) for one in given]
    if sum(torch.Size(one.shape).numel() for one in given) > LARGE or can_step(make, given):
        return given
    return whole if can_step(make, whole) else given


def can_step(make: MakeOptimizer, kinds: Sequence[Kind], *closure: Callable[[], float]) -> bool:
    try:
        optimizer, parameters = made(make, kinds)
        set_gradients(parameters, step=0)
        optimizer.step(*closure)
    except Exception:  # whatever a user's optimizer raises
        return False
    return True


def one_of_each(parameters: Mapping[str, torch.Tensor]) -> list[Kind]:
    """One for each number of dimensions.

    >>> found = one_of_each({"w": torch.ones(3, 4), "b": torch.ones(3), "v": torch.ones(4, 4)})
    >>> [(one.name, one.sizes) for one in found]
    [('v', (2, 2)), ('b', (2,))]
    """
    return [*{one.dim(): kind(name, one) for name, one in parameters.items()}.values()]


def small(kinds: Sequence[Kind], seed: int = 0) -> Named:
    draw = torch.Generator().manual_seed(seed)
    return [(one.name, torch.nn.Parameter(torch.randn(one.sizes, generator=draw))) for one in kinds]


def made(make: MakeOptimizer, kinds: Sequence[Kind]) -> tuple[torch.optim.Optimizer, Parameters]:
    """An optimizer of small parameters. Functions are called as in a script, outside of no_grad."""
    with torch.enable_grad():
        named = small(kinds)
        return make(list(named)), [parameter for _, parameter in named]


def set_gradients(parameters: Sequence[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=draw)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)
