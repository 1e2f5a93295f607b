"""Small parameters for a trial, and gradients that are the same in every trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from piper.runtime.optimizers.known_optimizers import MakeOptimizer, Named

Kind = tuple[str, int]  # of a parameter: its name, and how many dimensions it has
Parameters = list[torch.nn.Parameter]


def kind(name: str, parameter: torch.Tensor) -> Kind:
    return name, parameter.dim()


def one_of_each(parameters: Mapping[str, torch.Tensor]) -> list[Kind]:
    """One for each number of dimensions.

    >>> one_of_each({"w": torch.ones(3, 4), "b": torch.ones(3), "v": torch.ones(4, 4)})
    [('v', 2), ('b', 1)]
    """
    return [*{one.dim(): kind(name, one) for name, one in parameters.items()}.values()]


def small(kinds: Sequence[Kind], seed: int = 0) -> Named:
    draw = torch.Generator().manual_seed(seed)
    return [
        (name, torch.nn.Parameter(torch.randn([2] * dims, generator=draw))) for name, dims in kinds
    ]


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
