"""Whether a model and its loss run with other sizes of their inputs, seen without values."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from torch import nn

from piper.capture import torch_private
from piper.capture.precision import Precision
from piper.capture.trace.arguments.batch_dimension import (
    BatchDimension,
    Shape,
    batch_dimension,
    is_prime,
    new_size,
)
from piper.capture.trace.arguments.inputs import Inputs
from piper.capture.trace.arguments.separate_inputs import meet_in_numbers
from piper.capture.trace.forward import loss_graph
from piper.capture.trace.row_calls.unvalued_run import OtherLabelsFail, run_once
from piper.ir.values import TensorSpec

Some = frozenset[int]  # tensors of the inputs, by position


def tried(
    model: nn.Module, loss_fn: Any, inputs: Inputs, device: str, precision: Precision | None
) -> BatchDimension | None:
    """None: the model does not run with the sizes that it was given either."""
    sizes = OtherSizes(model, loss_fn, inputs, device, precision)
    found = batch_dimension(sizes.known, sizes.runs, sizes.taken)
    return found if found.groups or sizes.runs(sizes.known) else None


@dataclass(frozen=True)
class OtherSizes:
    model: nn.Module
    loss_fn: Any
    inputs: Inputs
    device: str
    precision: Precision | None
    seen: dict[Some, bool] = field(default_factory=dict)  # which can change, if the others do not

    @cached_property
    def known(self) -> list[Any]:
        return [spec.shape for spec in self.inputs.tensors]

    @cached_property
    def taken(self) -> set[int]:
        return {size for one in self.model.parameters() for size in one.shape}

    @cached_property
    def labels(self) -> Some:
        """The tensors of the last argument, if a loss reads it."""
        marks: list[Any] = [object() for _ in self.known]
        last = torch_private.pytree.tree_leaves(self.inputs.join(marks)[-1])
        found = (k for k, mark in enumerate(marks) if any(mark is one for one in last))
        return frozenset(found if self.loss_fn is not None else ())

    def runs(self, shapes: Sequence[Shape]) -> bool:
        changed = frozenset(k for k, shape in enumerate(shapes) if shape != self.known[k])
        if changed in self.seen:
            return self.seen[changed]
        everything = frozenset(k for k, shape in enumerate(self.known) if shape)
        together = bool(self.labels) and self.labels < changed == everything
        try:
            self.run(shapes, self.with_more_labels(shapes) if together else None)
        except OtherLabelsFail:
            self.seen[self.labels] = False
        except Exception:
            return False
        else:
            self.seen.update({self.labels: True} if together else {})
        return True

    def run(self, shapes: Sequence[Shape], others: Inputs | None) -> None:
        with torch_private.fake_errors_unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trace gives them again
            given = with_shapes(self.inputs, shapes), self.device, self.precision
            run_once(self.model, self.loss_fn, *given, others=others)

    def with_more_labels(self, shapes: Sequence[Shape]) -> Inputs:
        """With more rows than all else has: so a run with other labels alone needs no forward."""
        used = {*self.taken, *(size for shape in shapes for size in shape)}
        size = new_size(max(shapes[k][0] for k in self.labels), used)
        rows = [(size, *s[1:]) if k in self.labels else s for k, s in enumerate(shapes)]
        return with_shapes(self.inputs, rows)


def are_separate(
    model: nn.Module,
    loss_fn: Any,
    inputs: Inputs,
    groups: Mapping[int, int],
    device: str,
    precision: Precision | None,
) -> bool:
    """Whether `groups` of tensors, by position, meet only in numbers. False also if it fails."""
    sizes = OtherSizes(model, loss_fn, inputs, device, precision)
    taken = {*sizes.taken, *(size for shape in sizes.known for size in shape)}
    rows: dict[int, int] = {}
    for group in groups.values():
        if group not in rows:
            rows[group] = unlike(taken)
            taken.add(rows[group])
    shapes = [(rows[groups[k]], *s[1:]) if k in groups else s for k, s in enumerate(sizes.known)]
    with suppress(Exception), torch_private.fake_errors_unlogged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trace gave them
        others = with_shapes(inputs, shapes)
        graph = loss_graph(model, others, device, precision, loss_fn).graph
        batch = graph.find_nodes(op="placeholder")[-len(shapes) :]
        return meet_in_numbers(graph, {batch[k]: rows[group] for k, group in groups.items()})
    return False


def unlike(taken: Collection[int]) -> int:
    """A prime number that divides none of these.

    >>> unlike({8, 22, 26})
    17
    """
    return next(n for n in count(11) if is_prime(n) and all(size % n for size in taken if size))


def with_shapes(inputs: Inputs, shapes: Sequence[Shape]) -> Inputs:
    rest = iter(shapes)
    leaves = (
        replace(leaf, shape=next(rest)) if isinstance(leaf, TensorSpec) else leaf
        for leaf in inputs.leaves
    )
    return replace(inputs, leaves=tuple(leaves))
