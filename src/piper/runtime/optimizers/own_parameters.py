"""The model's own parameters, as an optimizer's function knows them from a plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Attributes = Mapping[str, Mapping[str, Any]]  # of parameters, by name


@dataclass(frozen=True, slots=True)
class WithAttributes:
    """Makes an optimizer of parameters that have the attributes of the model's own."""

    make: Any
    attributes: Attributes

    def __call__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        every = list(named)
        for name, parameter in every:
            vars(parameter).update(self.attributes.get(name, {}))
        return self.make(every)


def with_attributes(make: Any, parameters: Mapping[str, torch.Tensor]) -> Any:
    """Groups may depend on them, as `_no_weight_decay` of S4 and `_optim` of Mamba."""
    found = {name: dict(vars(one)) for name, one in parameters.items() if vars(one)}
    return WithAttributes(make, found) if found else make


def stand_in(own: torch.Tensor) -> torch.nn.Parameter:
    """Another parameter of the same values, or of none, as Piper's are: contiguous.

    It needs no memory, if the parameter is contiguous as well.
    """
    empty = torch.zeros((), dtype=own.dtype).expand(own.shape)
    value = empty if own.is_meta else own.detach().contiguous()
    return torch.nn.Parameter(value, own.requires_grad)


@contextmanager
def lent(parameters: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, Any]]]:
    """The parameters themselves. What a function sets on them does not stay."""
    before = [(one, one.requires_grad, dict(vars(one))) for one in parameters.values()]
    try:
        yield list(parameters.items())
    finally:
        for one, wants, fields in before:
            one.requires_grad_(wants)
            vars(one).clear()
            vars(one).update(fields)
