"""Writes in place that autograd does not see, while a model is traced.

In a trace, in-place operations become functions, with the gradients that these have. A write under
`no_grad`, or to what `detach()` or `.data` returned, leaves the history of other tensors in the
same memory as it was: gradients pass by what is written. Those of a function cannot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref as Ref

import torch
from torch import Tensor

from piper.capture.torch_private import (
    FunctionalTensor,
    inside_trace,
    pytree,
    storage_id,
)

_DETACHING = (torch.ops.aten.detach, torch.ops.aten.alias)


@dataclass(slots=True)
class Family:
    """Views that autograd knows as such: a write to one changes the history of all."""

    number: int  # in the order in which they came
    differentiable: bool = False
    members: list[Ref[Tensor]] = field(default_factory=list)

    def __contains__(self, tensor: Tensor) -> bool:
        return any(one() is tensor for one in self.members)

    @property
    def is_alive(self) -> bool:
        return any(one() is not None for one in self.members)

    def add(self, tensor: Tensor) -> None:
        self.members.append(Ref(tensor))
        self.note(tensor)

    def note(self, tensor: Tensor) -> None:
        self.differentiable = self.differentiable or has_history(tensor)


class Families:
    """The families of every memory in a trace."""

    def __init__(self) -> None:
        self.by_memory: dict[int, list[Family]] = {}
        self.count = 0  # of all families so far

    def computed(self, operator: Any, args: Any, results: Any, since: int) -> None:
        """Results of an operator that may be views of its arguments.

        `since`: how many families there were before it. It may consist of others, as `contiguous`
        does of a copy: what they made is the same to autograd.
        """
        given = tensors_in(args)
        seen = (
            torch.is_grad_enabled() and getattr(operator, "overloadpacket", None) not in _DETACHING
        )
        for result in tensors_in(results):
            memory = memory_of(result)
            base = next((one for one in given if memory_of(one) == memory), None)
            inner = [one for one in self._alive(memory) if one.number >= since]
            if base is not None and seen:
                family = self.of(base)
            else:
                family = inner[-1] if inner and seen else self._new(memory)
            if result not in family:
                family.add(result)

    def written(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors_in(tensors):
            self.of(tensor).note(tensor)

    def of(self, tensor: FunctionalTensor) -> Family:
        known = self._alive(memory_of(tensor))
        found = next((one for one in known if tensor in one), None)
        if found is None:  # an argument of the trace
            found = self._new(memory_of(tensor))
            found.add(tensor)
        return found

    def are_passed_by(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a write to them leaves the history of a tensor as it is."""
        return any(map(self._is_passed_by, tensors_in(tensors)))

    def _is_passed_by(self, written: FunctionalTensor) -> bool:
        own = self.of(written) if torch.is_grad_enabled() else None
        others = self._alive(memory_of(written))
        return (
            has_history(written)
            and own is None
            or any(one.differentiable for one in others if one is not own)
        )

    def _new(self, memory: int) -> Family:
        family = Family(self.count)
        self.count += 1
        self.by_memory[memory] = [*self._alive(memory), family]
        return family

    def _alive(self, memory: int) -> list[Family]:
        """Without families of which nothing is left; the memory may be another by now."""
        return [one for one in self.by_memory.get(memory, ()) if one.is_alive]


def tensors_in(values: Any) -> list[FunctionalTensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, FunctionalTensor)]


def has_history(one: Tensor) -> bool:
    """Whether a gradient flows through a tensor of a trace to others."""
    inside = inside_trace(one)
    return inside.requires_grad and not inside.is_leaf


def memory_of(one: FunctionalTensor) -> int:
    """The same for all views."""
    return storage_id(one.elem)
