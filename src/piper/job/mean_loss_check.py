"""Whether a loss is a mean over rows: else microbatches have another loss than the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piper.errors import InputError, Problem
from piper.job.batch import Batch
from piper.job.loss_reduction import Ignored, refuse_ignored
from piper.runtime.batch import part_of
from piper.runtime.torch_private import pytree

MOST = 2**25  # numbers that are tried: of a larger output, fewer rows, and some of the tokens
Output = tuple[list[Any], Any]  # leaves, with (shape, type) for tensors, and how they hang together


def refuse_no_mean(
    loss_fn: Callable[..., Any] | None,
    output: Output,
    batch: Batch,
    parts: int,
    ignored: Sequence[Ignored] = (),
) -> None:
    """Try it on made-up outputs and the labels of the batch: two halves of some rows, and all.

    What cannot be tried (outputs that are no numbers of rows, losses that want special ones) is
    left alone; so are labels that are ignored, which have a message of their own.
    """
    if loss_fn is None or is_refused(batch, ignored):
        return
    labels = batch.arguments[-1]
    rows = max(tensor.shape[0] for tensor in batch.tensors if tensor.dim()) // parts
    own = copy.deepcopy(loss_fn) if isinstance(loss_fn, torch.nn.Module) else loss_fn
    with torch.random.fork_rng(devices=[]):  # the user's numbers are left as they are
        found = [outcome(own, reading, labels, rows) for reading in readings(output, rows)]
    wrong = [
        numbers for numbers in found if numbers and not is_mean(*numbers, coarse(output, batch))
    ]
    if wrong and len(wrong) == len(found):
        whole, mean, _ = wrong[0]
        raise InputError(
            "loss",
            Problem(
                f"on made-up outputs it is {whole:.4g} for some rows together, and {mean:.4g} in "
                "the mean of two halves of them: microbatches would not add up to the whole batch",
                'if it is a sum, give the Trainer reduction="sum"; if rows weigh differently, '
                "loss_weight=lambda *microbatch: what its rows weigh; if you want the mean of "
                "microbatches, whatever the whole would be, loss_weight=lambda *microbatch: 1",
            ),
        )


def outcome(
    loss_fn: Callable[..., Any], output: Output, labels: Any, rows: int
) -> tuple[float, float, float] | None:
    """The loss of some rows, the mean of two halves, and the largest of all; None: not tried."""
    try:
        whole, halves = tried(loss_fn, output, labels, rows)
        again, _ = tried(loss_fn, output, labels, rows)
    except Exception:
        return None
    size = max(map(abs, (whole, *halves)))
    return (whole, sum(halves) / 2, size) if whole == again and size < float("inf") else None


def is_mean(whole: float, mean: float, size: float, within: float) -> bool:
    return abs(whole - mean) <= within * size


def coarse(output: Output, batch: Batch) -> float:
    """How far apart equal losses may be: they may be computed in types of what they are given."""
    types = [leaf[1] for leaf in output[0] if is_tensor(leaf)]
    types += [tensor.dtype for tensor in batch.tensors]
    return 2e-2 if {torch.bfloat16, torch.float16} & set(types) else 1e-3


def readings(output: Output, rows: int) -> list[Output]:
    """A vector beside matrices may have a number for each row, or as many by chance."""
    leaves, spec = output
    vectors = [has_rows(leaf, rows) and len(leaf[0]) == 1 for leaf in leaves]
    matrices = [has_rows(leaf, rows) and len(leaf[0]) > 1 for leaf in leaves]
    if not any(vectors) or not any(matrices):
        return [output]
    fixed = [Fixed(leaf) if alone else leaf for leaf, alone in zip(leaves, vectors, strict=True)]
    return [output, (fixed, spec)]


class Fixed(tuple[Any, ...]):
    """An output without rows."""

    __slots__ = ()


def tried(
    loss_fn: Callable[..., Any], output: Output, labels: Any, rows: int
) -> tuple[float, list[float]]:
    """The loss of two parts together, and of each: two microbatches, or two halves of one."""
    (leaves, spec), labels = thinned(output, labels, rows)
    given = [t for t in pytree.tree_leaves(labels) if isinstance(t, torch.Tensor) and t.dim()]
    fits = MOST * rows // max(1, 2 * sum(map(numel, leaves)))
    unit = min(fits, rows if given[0].shape[0] >= 2 * rows else rows // 2)
    if not unit:
        raise ValueError("too few rows, or too much to try")
    draw = torch.Generator().manual_seed(0)
    made = [like(leaf, rows, 2 * unit, draw, given[0].device) for leaf in leaves]

    def loss(part: int, parts: int) -> float:
        mine = [cut(one, leaf, rows, part, parts) for one, leaf in zip(made, leaves, strict=True)]
        some = pytree.tree_map_only(torch.Tensor, lambda t: t[: 2 * unit] if t.dim() else t, labels)
        wanted = pytree.tree_map_only(torch.Tensor, lambda t: part_of(t, part, parts), some)
        with torch.no_grad():
            return float(loss_fn(pytree.tree_unflatten(mine, spec), wanted))

    return loss(0, 1), [loss(0, 2), loss(1, 2)]


def thinned(output: Output, labels: Any, rows: int) -> tuple[Output, Any]:
    """Every so many tokens of long rows: those that count may be at either end."""
    leaves, spec = output
    step = -(-2 * sum(map(numel, leaves)) // (rows * MOST))
    first = next(t for t in pytree.tree_leaves(labels) if isinstance(t, torch.Tensor) and t.dim())
    if step <= 1 or first.dim() < 2:
        return output, labels
    length = first.shape[1]

    def fewer(leaf: Any) -> Any:
        if not is_tensor(leaf) or len(leaf[0]) < 3 or leaf[0][1] != length:
            return leaf
        (batch, _, *rest), dtype = leaf
        return (batch, -(-length // step), *rest), dtype

    def every(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, ::step] if tensor.shape[1:2] == (length,) else tensor

    return ([*map(fewer, leaves)], spec), pytree.tree_map_only(torch.Tensor, every, labels)


def numel(leaf: Any) -> int:
    return torch.Size(leaf[0]).numel() if is_tensor(leaf) else 0


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], torch.dtype)


def has_rows(leaf: Any, rows: int) -> bool:
    """A single number that stands alone has none, whatever the number of rows."""
    batched = is_tensor(leaf) and not isinstance(leaf, Fixed) and leaf[0][:1] == (rows,)
    return batched and torch.Size(leaf[0]).numel() > 1


def like(leaf: Any, rows: int, wanted: int, draw: torch.Generator, device: torch.device) -> Any:
    """Numbers for an output, for so many rows where it has rows."""
    if not is_tensor(leaf):
        return leaf
    shape, dtype = leaf
    if has_rows(leaf, rows):
        shape = (wanted, *shape[1:])
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    made = torch.randn(shape, generator=draw, dtype=kind)
    if has_rows(leaf, rows):  # halves that are unlike each other
        made *= torch.linspace(0.5, 3.0, wanted, dtype=kind).view(-1, *[1] * (len(shape) - 1))
    return made.to(device)


def cut(made: Any, leaf: Any, rows: int, part: int, parts: int) -> Any:
    return part_of(made, part, parts) if has_rows(leaf, rows) else made


def is_refused(batch: Batch, ignored: Sequence[Ignored]) -> bool:
    """By a step, with a message of its own."""
    try:
        refuse_ignored(batch, ignored)
    except InputError:
        return True
    return False
