"""Try whether the gradients of a loss are those of its halves, for models too large to be tried.

`a + b * (a / b).detach()` is a mean in its value, as `a` and `b` are, and not in its gradient. The
loss alone shows it, on random outputs of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.trace.trials.trial_copy import TrialCopy
from piper.capture.tracing_private import unchecked_distributions
from piper.job.batch.batch import Batch
from piper.job.loss.loss_reduction import LossReduction
from piper.job.loss.mean_loss_check import ROUNDING, Trial, coarsest, prepared
from piper.job.loss.random_outputs import (
    Output,
    cut,
    interpretations,
    is_batched,
    is_tensor,
    like,
    thinned,
)
from piper.runtime.batch import part_of
from piper.runtime.torch_private import pytree

Found = tuple[Tensor, tuple[Tensor, ...]]  # a loss, and its gradients


def have_other_gradients(
    loss_fn: Callable[..., Any] | None, output: Output, one: Batch, reduction: LossReduction
) -> bool:
    """Whether the loss is that of its halves, and its gradients are not.

    Both halves have the same labels, so they have the same weight, however that is counted.
    """
    if loss_fn is None or any(type(size) is not int for size in sizes_of(output)):
        return False
    for kind in (torch.float64, torch.float32):  # not all losses compute in float64
        with suppress(Exception):  # what cannot be tried is told elsewhere
            return are_other(loss_fn, output, one, reduction, kind)
    return False


def are_other(
    loss_fn: Callable[..., Any],
    output: Output,
    one: Batch,
    reduction: LossReduction,
    kind: torch.dtype,
) -> bool:
    rows, alone = one.rows or 0, TrialCopy.of(nn.Module(), loss_fn, kind)
    assert alone.loss_fn is not None
    with alone.alone():
        own, output, labels = prepared(alone.loss_fn, output, one, reduction.form)
        each = [
            is_other(list(runs(own, made, labels, rows, kind)), reduction, made, labels)
            for made in interpretations(output, rows)
            if any(is_batched(leaf, rows) for leaf in made[0])
        ]
    return bool(each) and all(each)


def sizes_of(output: Output) -> Iterator[Any]:
    for leaf in filter(is_tensor, output[0]):
        yield from leaf[0]


def is_other(found: Sequence[Found], reduction: LossReduction, output: Output, labels: Any) -> bool:
    (whole, wanted), (again, same), *halves = found
    limit = ROUNDING[coarsest(output, labels, whole.dtype)]
    parts = len(halves) if reduction.kind == "mean" else 1
    if whole != again or apart(whole, sum(loss for loss, _ in halves) / parts) > limit:
        return False
    summed = [sum(grads) / parts for grads in zip(*[each for _, each in halves], strict=True)]
    return any(
        torch.equal(a, b) and apart(a, c) > limit
        for a, b, c in zip(wanted, same, summed, strict=True)
    )


def apart(one: Tensor, other: Tensor) -> float:
    """The difference, relative to the larger one. What is not finite says nothing."""
    size = max(float(one.abs().max()), float(other.abs().max()))
    return float((one - other).abs().max()) / size if 0.0 < size < float("inf") else 0.0


def runs(
    loss_fn: Callable[..., Any], output: Output, labels: Any, rows: int, kind: torch.dtype
) -> Iterator[Found]:
    """Of both halves together, twice, and of each."""
    (leaves, spec), labels = thinned(output, labels, rows)
    given = [t for t in pytree.tree_leaves(labels) if isinstance(t, Tensor) and t.dim()]
    unit = Trial(output, labels, rows, 0, kind).unit(leaves, given[0])
    twice = pytree.tree_map_only(
        Tensor, lambda t: torch.cat(2 * [t[:unit]]) if t.dim() else t, labels
    )
    draw = torch.Generator().manual_seed(0)
    made = [like(leaf, rows, 2 * unit, draw, given[0].device, kind) for leaf in leaves]
    floats = [one.requires_grad_() for one in made if is_trained(one)]
    for part, parts in ((0, 1), (0, 1), (0, 2), (1, 2)):
        outputs = [cut(m, leaf, rows, part, parts) for m, leaf in zip(made, leaves, strict=True)]
        wanted = pytree.tree_map_only(Tensor, partial(part_of, part=part, parts=parts), twice)
        with torch.enable_grad(), warnings.catch_warnings(), unchecked_distributions():
            warnings.simplefilter("ignore")
            loss = torch.as_tensor(loss_fn(pytree.tree_unflatten(outputs, spec), wanted))
            grads = torch.autograd.grad(loss, floats, materialize_grads=True)
        yield loss.detach(), grads


def is_trained(one: Any) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()
