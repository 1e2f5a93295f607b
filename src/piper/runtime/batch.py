"""What a step works on: batches cut into microbatches, and batches that cannot be, refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piper.errors import InputError, Problem
from piper.runtime.torch_private import pytree


@dataclass
class Batch:
    """What one step works on: this replica's inputs, and what each microbatch weighs."""

    inputs: tuple[torch.Tensor, ...]
    weights: tuple[float, ...]  # of each microbatch in the loss; they add up to 1 for a mean
    seed: int = 0
    max_norm: float | None = None
    first: int = 0  # number of its first microbatch among those of all replicas


def part_of(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """One microbatch's rows; a tensor without rows is whole for every microbatch."""
    if tensor.dim() == 0:
        return tensor
    rows = tensor.shape[0] // parts
    return tensor.narrow(0, part * rows, rows).contiguous()


def refuse_ignored(
    inputs: Sequence[torch.Tensor], ignored: Sequence[tuple[int | None, int | None]]
) -> None:
    """A mean over the labels that count is not the mean of the microbatches' means."""
    for index, label in ignored:
        if index is None or label is None:
            raise InputError(
                "loss",
                Problem(
                    "cross_entropy weighs classes, or its labels are computed, so microbatches "
                    "may weigh differently",
                    "give the Trainer loss_weight=lambda *microbatch: the weight of its labels, "
                    "or 1 if all weigh the same",
                ),
            )
        if (inputs[index] == label).any():
            raise InputError(
                "batch",
                Problem(
                    f"it has labels that cross_entropy ignores ({label}), so microbatches weigh "
                    "differently",
                    "give the Trainer loss_weight=lambda *microbatch: the number of labels that "
                    "count",
                ),
            )


def weighed(
    weight: Callable[..., Any] | None, reduction: str, batch: tuple[Any, ...], parts: int
) -> list[float]:
    """What each microbatch of a batch weighs, by what the user says."""
    if weight is None:
        return [1.0] * parts
    found = [float(weight(*microbatch(batch, k, parts))) for k in range(parts)]
    if reduction == "mean":
        refuse_empty(found)
    return found


def shares(
    own: Sequence[float], everyone: float, reduction: str, weighed: bool
) -> tuple[float, ...]:
    """What each microbatch counts in the loss.

    >>> shares([1.0, 3.0], 8.0, "mean", True), shares([1.0, 3.0], 8.0, "sum", False)
    ((0.125, 0.375), (1.0, 1.0))
    """
    if reduction == "sum":
        return (1.0 / everyone if weighed else 1.0,) * len(own)
    return tuple(weight / everyone for weight in own)


def refuse_empty(weights: Sequence[float]) -> None:
    for part, weight in enumerate(weights):
        if weight <= 0:
            raise InputError(
                "batch",
                Problem(
                    f"microbatch {part} weighs {weight:g}: a mean over nothing is not a number",
                    'use a loss that is a sum, and Trainer(reduction="sum", loss_weight=...)',
                ),
            )


def refuse_weightless(everyone: float) -> None:
    if everyone <= 0:
        raise InputError(
            "batch",
            Problem(
                "no microbatch of any replica weighs anything",
                "leave such a batch out, or let loss_weight count something in it",
            ),
        )


def tensors_of(batch: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def tokens_in(inputs: Sequence[torch.Tensor]) -> int:
    """Without whole numbers among the inputs, rows."""
    counts = (t.numel() for t in inputs if not t.is_floating_point())
    rows = (t.shape[0] for t in inputs if t.dim())
    return next(counts, next(rows, 1))


def microbatch(batch: tuple[Any, ...], part: int, parts: int) -> tuple[Any, ...]:
    def cut(leaf: Any) -> Any:
        return part_of(leaf, part, parts) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(cut, batch)


def shape_key(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(batch)
    return tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves
    ) + (str(spec),)


def refuse_uneven(batch: tuple[Any, ...], parts: int) -> None:
    """All tensors with rows have equally many, and a number that divides into microbatches."""
    rows = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()]
    if not rows:
        kinds = ", ".join(type(leaf).__name__ for leaf in pytree.tree_leaves(batch)) or "nothing"
        what = f"it has no tensor with rows, but {kinds}"
        raise InputError("batch", Problem(what, "give tensors: torch.as_tensor(...)"))
    if len(set(rows)) > 1:
        raise InputError(
            "batch",
            Problem(
                f"its tensors have different numbers of rows: {rows}",
                "give every tensor the batch as its first dimension",
            ),
        )
    if rows[0] == 0:
        raise InputError("batch", Problem("it has no rows", "leave out empty batches"))
    if rows[0] % parts:
        near = max(rows[0] // parts, 1) * parts
        raise InputError(
            "batch",
            Problem(
                f"{rows[0]} rows do not divide into {parts} microbatches",
                f"use a batch of {near} or {near + parts} rows, or split into fewer microbatches",
            ),
        )


def reduction_of(
    said: str | None, loss_fn: Any, weight: Callable[..., Any] | None, parts: int
) -> str:
    """How losses of microbatches become one. What a loss function does can be tried (means.py);
    what a model does with its own rows cannot, so its user has to say it."""
    if said not in (None, "mean", "sum"):
        raise InputError("reduction", Problem(f"{said!r} is no reduction", 'write "mean" or "sum"'))
    if said is None and loss_fn is None and weight is None and parts > 1:
        raise InputError(
            "reduction",
            Problem(
                f"the model gives its own loss, of each of {parts} parts of a batch, and Piper "
                "cannot see what becomes of rows in it",
                'give the Trainer reduction="mean" if all parts count alike, "sum" if they add up, '
                "or loss_weight=lambda *microbatch: what it counts",
            ),
        )
    return said or "mean"
