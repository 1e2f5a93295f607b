"""Inputs that every microbatch gets whole, such as a mask that all samples share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from piper.capture import Captured
from piper.capture.precision import Precision
from piper.capture.python_state.function_caches import forgetting
from piper.capture.trace.arguments.batch_dimension import BatchDimension, Groups
from piper.capture.trace.arguments.call_arguments import LABELS
from piper.capture.trace.arguments.inputs import inputs_of
from piper.capture.trace.arguments.outputs import joined
from piper.errors import InputError
from piper.ir.values import Role
from piper.job.batch.batch import Batch, is_tensor
from piper.job.batch.input_names import input_names
from piper.job.batch.other_sizes import are_separate, tried
from piper.job.batch.row_lists import Lists, lists_of, refuse_row_lists

# Of a tensor, how many dimensions it has, and whether it has a single row: it may be for all rows
# in one batch, and have one for each in the next.
Name = tuple[str, int, bool]
FIX = (
    'name those that every microbatch gets whole, whole=["mask"], or write whole=[] if none is; '
    "where a loss compares rows with each other, use one microbatch and one replica"
)


@dataclass(frozen=True, slots=True)
class KnownInputs:
    """What is known of the tensors of batches, by name. All programs of a job share it."""

    whole: dict[Name, bool] = field(default_factory=dict)
    unclear: dict[Name, int] = field(default_factory=dict)  # which of several groups it is in
    names: dict[Any, tuple[str, ...]] = field(default_factory=dict)  # by what a batch is made of


@dataclass(frozen=True, slots=True)
class WholeInputs:
    """Finds out which tensors every microbatch gets as they are."""

    model: torch.nn.Module
    loss_fn: Any
    given: Sequence[str] | None  # as the user says; None: see what the model can take
    inputs: KnownInputs = field(default_factory=KnownInputs)

    @property
    def known(self) -> dict[Name, bool]:
        return self.inputs.whole

    @property
    def unclear(self) -> dict[Name, int]:
        return self.inputs.unclear

    def plain_names(self, batch: Batch) -> tuple[str, ...]:
        """As a user calls them. Every step asks, and signatures take long to read."""
        kinds = tuple(map(is_tensor, batch.leaves))
        key = batch.labelled, str(batch.spec), kinds
        if key not in self.inputs.names:
            loss_fn = self.loss_fn if batch.labelled else None
            self.inputs.names[key] = tuple(input_names(self.model, loss_fn, batch))
        return self.inputs.names[key]

    def names(self, batch: Batch) -> list[Name]:
        pairs = zip(self.plain_names(batch), batch.tensors, strict=True)
        return [(name, one.dim(), one.shape[:1] == (1,)) for name, one in pairs]

    def lists(self, batch: Batch) -> Lists:
        return lists_of(self.model, self.loss_fn, batch)

    def is_label(self, name: str) -> bool:
        return self.loss_fn is not None and bool(named_by([LABELS], [name]))

    def marked(self, batch: Batch) -> Batch:
        """The batch, with what is known of its tensors."""
        names = self.names(batch) if self.known else []
        return replace(batch, whole=frozenset(k for k, n in enumerate(names) if self.known.get(n)))

    def learn(self, batch: Batch, whole: Iterable[int]) -> None:
        """As another process found it."""
        self.known.update({name: k in whole for k, name in enumerate(self.names(batch))})

    def found(self, batch: Batch, parts: int, device: str, precision: Precision | None) -> Batch:
        """The same, found out if need be. `batch` has the types that the model gets."""
        names = self.names(batch)
        if not all(name in self.known for name in names):
            if self.given is not None:
                known = [*(name for name, *_ in names), *(name for name, _ in self.lists(batch))]
                refuse_unknown(self.given, known, batch.labelled)
                self.learn(batch, named_by(self.given, [name for name, *_ in names]))
            elif parts > 1 or len({one.shape[0] for one in batch.cut}) > 1:
                self.judge(batch, names, device, precision)
        found = self.marked(batch)
        if parts > 1:
            refuse_row_lists(self.lists(found), found.rows, self.given or ())
        return found

    @forgetting()
    def judge(
        self, batch: Batch, names: list[Name], device: str, precision: Precision | None
    ) -> None:
        loss_fn, arguments = self.loss_fn, batch.arguments
        if not batch.labelled:
            loss_fn, arguments = joined, (*arguments, None)
        found = tried(self.model, loss_fn, inputs_of(arguments), device, precision)
        if found is None:
            return  # it will fail as it is
        found = BatchDimension(joined_by_shape(found.groups, batch.tensors))
        if found.is_clear:
            cut = found.groups[0]
        else:  # whether that matters is known when the model is captured
            rows = batch.rows
            cut = frozenset(k for k, one in enumerate(batch.tensors) if one.shape[:1] == (rows,))
            groups = found.groups or tuple(frozenset({k}) for k in cut)
            self.unclear.update({names[k]: n for n, group in enumerate(groups) for k in group})
        self.learn(batch, [k for k, one in enumerate(batch.tensors) if one.dim() and k not in cut])

    def refuse_unclear(self, batch: Batch, captured: Captured, precision: Precision | None) -> None:
        """Sizes must say which tensors are the batch, of those that the model reads.

        Labels of a loss function are cut: it is proved or tested that microbatches add up then. So
        are tensors that meet only in numbers.
        """
        values = captured.model.values.values()
        used = {one.index for one in values if one.role is Role.BATCH}
        groups: dict[int, list[str]] = {}
        for k, name in enumerate(names := self.names(batch)):
            if k in used and name in self.unclear and not self.is_label(name[0]):
                groups.setdefault(self.unclear[name], []).append(name[0])
        own = {k: self.unclear[name] for k, name in enumerate(names) if name in self.unclear}
        given = self.model, self.loss_fn, captured.inputs, own, captured.device, precision
        if len(groups) > 1 and not are_separate(*given):
            those = ", or ".join(" and ".join(names) for names in groups.values())
            what = (
                f"sizes do not say which tensors have the batch as their first dimension: {those}"
            )
            raise InputError.of("batch", what, FIX)


def joined_by_shape(groups: Groups, tensors: Sequence[torch.Tensor]) -> Groups:
    """Token ids and a mask of the same [batch, tokens] belong together, also with several choices
    for each sample, [batch, choices, tokens].

    Many models look their mask up row by row. Then it can have more rows than there are tokens,
    like a table, and a run without values does not tell it from one. Tables are rarely of whole
    numbers, and hardly ever of the shape of the tokens.
    """
    marks = [group for group in groups if all(is_mark(tensors[k]) for k in group)]
    found = [group for group in groups if group not in marks]
    for mark in marks:
        shapes = [tensors[k].shape[:2] for k in mark]
        alike = [g for g in found if any(tensors[k].shape[:2] in shapes for k in g)]
        found = [g for g in found if g not in alike] + [mark.union(*alike)]
    return tuple(found)


def is_mark(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= 2 and not tensor.is_floating_point()


def named_by(given: Sequence[str], names: Sequence[str]) -> list[int]:
    """The tensors with these names, or inside of an argument with such a name.

    >>> named_by(["mask", "y.1"], ["x", "mask.0", "mask.1", "y.0", "y.1"])
    [1, 2, 4]
    """

    def fits(name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in given)

    return [k for k, name in enumerate(names) if fits(name)]


def refuse_unknown(given: Sequence[str], names: Sequence[str], labelled: bool) -> None:
    """A misspelt name would silently change nothing. Without labels, some may be missing."""
    for one in given if labelled else ():
        if not named_by([one], names):
            what = f"no tensor of the batch is called {one!r}"
            raise InputError.of("whole", what, f"the batch has {', '.join(names)}")
