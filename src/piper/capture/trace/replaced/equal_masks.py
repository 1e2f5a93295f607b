"""Masks that are equal choose equally many elements, so one tensor stands for all of them.

`mse_loss(o[y > 0], y[y > 0])` compares two sizes, which a trace does not know. torch knows that
they are the same where one and the same tensor has chosen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.fx_nodes import closure
from piper.capture.python_state.graph_equality import computed_alike
from piper.capture.trace.replaced.numbers import is_number, selected
from piper.capture.tracing_private import node_of


class EqualMasks:
    """Replaces the masks in calls that choose elements. `calls`: by the names of functions."""

    def __init__(self) -> None:
        self.first: dict[Any, Tensor] = {}  # the first of equal masks, by what it is
        self.numbers: dict[fx.Node, int] = {}  # the same for nodes that compute the same
        self.table: dict[Any, int] = {}
        self.calls: dict[str, Callable[..., Any]] = {
            "__getitem__": self.indexed,
            "__setitem__": self.indexed,
            "masked_select": self.selected,
            "nonzero": self.found,
            "argwhere": self.found,
            "where": self.found,
        }

    def indexed(self, func: Any, tensor: Tensor, index: Any, *value: Any) -> Any:
        several = isinstance(index, tuple)
        given = index if several else (index,)
        if any(map(is_number, given)):
            return selected(func, tensor, given, *value)
        if not any(map(is_mask, given)):
            return NotImplemented
        masks = tuple(self.same(one) if is_mask(one) else one for one in given)
        return func(tensor, masks if several else masks[0], *value)

    def selected(self, func: Any, input: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        """As an index, whose size is known to be that of others."""
        if kwargs or not is_mask(mask):
            return NotImplemented
        if input.shape != mask.shape:
            shape = torch.broadcast_shapes(input.shape, mask.shape)
            input, mask = input.expand(shape), mask.expand(shape)
        return input[self.same(mask)]

    def found(self, func: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        if rest or not is_mask(mask):
            return NotImplemented
        return func(self.same(mask), **kwargs)

    def same(self, mask: Tensor) -> Tensor:
        """The first mask that is equal to this one, unless it has been written to since."""
        key = self.key(mask)
        first = self.first.setdefault(key, mask)
        if first is mask or self.key(first) == key:
            return first
        self.first[key] = mask
        return mask

    def key(self, mask: Tensor) -> Any:
        """Without a graph, nothing is computed, and masks of one shape may be equal."""
        node = node_of(mask)
        return (tuple(mask.shape), mask.device) if node is None else self.number(node)

    def number(self, node: fx.Node) -> int:
        for one in sorted(closure([node], self.numbers)):
            key = computed_alike(one, self.numbers.get)
            self.numbers[one] = self.table.setdefault(key, len(self.table))
        return self.numbers[node]


def is_mask(one: Any) -> bool:
    return isinstance(one, Tensor) and one.dtype is torch.bool and one.dim() > 0
