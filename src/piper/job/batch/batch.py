"""The batch of a step as one value, which can be split into microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch

from piper.capture.trace.arguments.call_arguments import flatten
from piper.errors import InputError
from piper.names import amount
from piper.runtime.batch import part_of
from piper.runtime.torch_private import pytree

TOKEN_IDS = (torch.int64, torch.int32)
Sizes = tuple[int, ...]  # rows of the microbatches of one replica; empty: all have equally many
Shapes = tuple[Any, ...]  # shape and dtype (or text) of each leaf, then their nesting


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of a step, flattened: tensors, and whatever else a model takes."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    whole: frozenset[int] = frozenset()  # tensors that every microbatch gets as they are
    labelled: bool = True  # the last argument is for the loss function, if there is one

    @staticmethod
    def of(arguments: tuple[Any, ...]) -> Batch:
        leaves, spec = flatten(arguments)
        return Batch(tuple(resolved(x) if is_tensor(x) else x for x in leaves), spec)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Keywords, if any, then what is given by position. The last is for the loss function."""
        found: tuple[Any, ...] = pytree.tree_unflatten(self.leaves, self.spec)
        return found

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    @cached_property
    def shapes(self) -> Shapes:
        """What a program is compiled for. Numbers and texts become its constants."""
        leaves = ((tuple(x.shape), x.dtype) if is_tensor(x) else repr(x) for x in self.leaves)
        return (*leaves, str(self.spec))

    @property
    def tokens(self) -> int | None:
        """Tokens of a batch that begins with token ids, as [rows, length]. None: it has none."""
        first = next((tensor for tensor in self.cut if tensor.dtype is not torch.bool), None)
        if first is None or first.dim() != 2 or first.dtype not in TOKEN_IDS:
            return None
        return int(first.numel())

    @property
    def cut(self) -> list[torch.Tensor]:
        """The tensors that are cut into microbatches."""
        known = enumerate(self.tensors)
        return [tensor for k, tensor in known if tensor.dim() and k not in self.whole]

    @property
    def rows(self) -> int | None:
        """Samples of the batch. None: no tensor has rows."""
        return next((tensor.shape[0] for tensor in self.cut), None)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same with other tensors."""
        return replace(self, leaves=tuple(change(x) if is_tensor(x) else x for x in self.leaves))

    def in_type(self, dtype: torch.dtype, labels: bool) -> Batch:
        """Floating-point tensors in this type; but not the last argument, if it is `labels`."""
        last = len(self.arguments) - 1 if labels else None
        arguments = [Batch.of((one,)) for one in self.arguments]
        changed = [
            one if k == last else one.map(partial(floating_in, dtype))
            for k, one in enumerate(arguments)
        ]
        return replace(self, leaves=tuple(leaf for one in changed for leaf in one.leaves))

    def part(self, part: int, parts: int, sizes: Sizes = ()) -> Batch:
        """One microbatch, or the part of one replica."""
        return self.change_rows(lambda tensor: part_of(tensor, part, parts, sizes))

    def change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same with another number of samples."""
        position = count()
        return self.map(
            lambda tensor: (
                change(tensor) if next(position) not in self.whole and tensor.dim() else tensor
            )
        )

    def repeated(self, times: int) -> Batch:
        """A batch with so many equal microbatches."""
        return self.change_rows(lambda tensor: torch.cat([tensor] * times))

    def parts(self, parts: int, sizes: Sizes = ()) -> list[Batch]:
        return [self.part(k, parts, sizes) for k in range(parts)]


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Without a conjugate or a negative that is still to be computed: kernels want values."""
    waits = tensor.is_conj() or tensor.is_neg()
    return tensor.resolve_conj().resolve_neg() if waits else tensor


def floating_in(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def refuse_uneven(batch: Batch, replicas: int, parts: int) -> None:
    """All tensors must have the same number of rows, divisible by the number of replicas."""
    rows = [tensor.shape[0] for tensor in batch.cut]
    if not rows:
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in batch.leaves)) or "nothing"
        what = f"it has no tensor with rows, only {kinds}"
        raise InputError.of("batch", what, "give tensors: torch.as_tensor(...)")
    if len(set(rows)) > 1 and parts > 1:
        raise InputError.of(
            "batch",
            f"its tensors have different numbers of rows: {rows}",
            "give every tensor, labels too, the rows of one batch as its first dimension, or name "
            'those that every microbatch gets whole: whole=["mask"]',
        )
    if rows[0] == 0:
        raise InputError.of("batch", "it has no rows", "leave out empty batches")
    if rows[0] % replicas:
        near = max(rows[0] // replicas, 1) * replicas
        raise InputError.of(
            "batch",
            f"it has {amount(rows[0], 'row')}, not a multiple of the {replicas} replicas in it",
            f"use a batch of {near} or {near + replicas} rows",
        )
