"""Check that a loss is a mean over samples. Otherwise microbatches change the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piper.errors import InputError
from piper.job.batch import Batch
from piper.job.loss_reduction import Ignored, refuse_ignored
from piper.runtime.batch import part_of
from piper.runtime.torch_private import pytree

MOST = 2**25  # elements to try; of larger outputs, fewer samples and tokens
Output = tuple[list[Any], Any]  # leaves, (shape, dtype) for tensors, and their nesting


def refuse_no_mean(
    loss_fn: Callable[..., Any] | None,
    output: Output,
    batch: Batch,
    parts: int,
    ignored: Sequence[Ignored] = (),
) -> None:
    """Evaluate the loss on random outputs and the labels of the batch: on some samples, and on the
    two halves of them.

    A loss that cannot be evaluated like this is accepted. Ignored labels have their own error.
    """
    if loss_fn is None or has_ignored_labels(batch, ignored):
        return
    labels = batch.arguments[-1]
    samples = max(tensor.shape[0] for tensor in batch.tensors if tensor.dim()) // parts
    own = copy.deepcopy(loss_fn) if isinstance(loss_fn, torch.nn.Module) else loss_fn
    with torch.random.fork_rng(devices=[]):  # do not change the user's random state
        found = [
            outcome(own, interpretation, labels, samples)
            for interpretation in interpretations(output, samples)
        ]
    wrong = [
        numbers for numbers in found if numbers and not is_mean(*numbers, coarse(output, batch))
    ]
    if wrong and len(wrong) == len(found):
        whole, mean, _ = wrong[0]
        raise InputError.of(
            "loss",
            f"on random outputs it is {whole:.4g} for some rows together, and {mean:.4g} in "
            "the mean of two halves of them: microbatches would not add up to the whole batch",
            'if it is a sum, give the Trainer reduction="sum"; if rows have different '
            "weights, loss_weight=lambda *microbatch: the weight of its rows; if you want the "
            "mean of the microbatches anyway, loss_weight=lambda *microbatch: 1",
        )


def outcome(
    loss_fn: Callable[..., Any], output: Output, labels: Any, samples: int
) -> tuple[float, float, float] | None:
    """The loss of some samples, the mean of its halves, and the largest of these losses.

    None if it cannot be evaluated, or is not deterministic.
    """
    try:
        whole, halves = tried(loss_fn, output, labels, samples)
        again, _ = tried(loss_fn, output, labels, samples)
    except Exception:
        return None
    size = max(map(abs, (whole, *halves)))
    return (whole, sum(halves) / 2, size) if whole == again and size < float("inf") else None


def is_mean(whole: float, mean: float, size: float, within: float) -> bool:
    return abs(whole - mean) <= within * size


def coarse(output: Output, batch: Batch) -> float:
    """The tolerance: the loss may be computed in the types of the outputs or the batch."""
    types = [leaf[1] for leaf in output[0] if is_tensor(leaf)]
    types += [tensor.dtype for tensor in batch.tensors]
    return 2e-2 if {torch.bfloat16, torch.float16} & set(types) else 1e-3


def interpretations(output: Output, samples: int) -> list[Output]:
    """A vector next to matrices may have one element per sample, or as many by chance."""
    leaves, spec = output
    vectors = [is_batched(leaf, samples) and len(leaf[0]) == 1 for leaf in leaves]
    matrices = [is_batched(leaf, samples) and len(leaf[0]) > 1 for leaf in leaves]
    if not any(vectors) or not any(matrices):
        return [output]
    fixed = [
        Unbatched(leaf) if alone else leaf for leaf, alone in zip(leaves, vectors, strict=True)
    ]
    return [output, (fixed, spec)]


class Unbatched(tuple[Any, ...]):
    """An output without a batch dimension."""

    __slots__ = ()


def tried(
    loss_fn: Callable[..., Any], output: Output, labels: Any, samples: int
) -> tuple[float, list[float]]:
    """The loss of two parts together, and of each: two microbatches, or two halves of one."""
    (leaves, spec), labels = thinned(output, labels, samples)
    given = [t for t in pytree.tree_leaves(labels) if isinstance(t, torch.Tensor) and t.dim()]
    fits = MOST * samples // max(1, 2 * sum(map(numel, leaves)))
    unit = min(fits, samples if given[0].shape[0] >= 2 * samples else samples // 2)
    if not unit:
        raise ValueError("too few samples, or too many elements")
    draw = torch.Generator().manual_seed(0)
    made = [like(leaf, samples, 2 * unit, draw, given[0].device) for leaf in leaves]

    def loss(part: int, parts: int) -> float:
        outputs = [
            cut(one, leaf, samples, part, parts) for one, leaf in zip(made, leaves, strict=True)
        ]
        some = pytree.tree_map_only(torch.Tensor, lambda t: t[: 2 * unit] if t.dim() else t, labels)
        wanted = pytree.tree_map_only(torch.Tensor, lambda t: part_of(t, part, parts), some)
        with torch.no_grad():
            return float(loss_fn(pytree.tree_unflatten(outputs, spec), wanted))

    return loss(0, 1), [loss(0, 2), loss(1, 2)]


def thinned(output: Output, labels: Any, samples: int) -> tuple[Output, Any]:
    """Keep every n-th token of long samples: ignored tokens may be at either end."""
    leaves, spec = output
    step = -(-2 * sum(map(numel, leaves)) // (samples * MOST))
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


def is_batched(leaf: Any, samples: int) -> bool:
    """Whether an output has a batch dimension. A single number has none."""
    batched = is_tensor(leaf) and not isinstance(leaf, Unbatched) and leaf[0][:1] == (samples,)
    return batched and torch.Size(leaf[0]).numel() > 1


def like(leaf: Any, samples: int, wanted: int, draw: torch.Generator, device: torch.device) -> Any:
    """Random values for an output, for `wanted` samples if it is batched."""
    if not is_tensor(leaf):
        return leaf
    shape, dtype = leaf
    if is_batched(leaf, samples):
        shape = (wanted, *shape[1:])
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    made = torch.randn(shape, generator=draw, dtype=kind)
    if is_batched(leaf, samples):  # so that the halves differ
        made *= torch.linspace(0.5, 3.0, wanted, dtype=kind).view(-1, *[1] * (len(shape) - 1))
    return made.to(device)


def cut(made: Any, leaf: Any, samples: int, part: int, parts: int) -> Any:
    return part_of(made, part, parts) if is_batched(leaf, samples) else made


def has_ignored_labels(batch: Batch, ignored: Sequence[Ignored]) -> bool:
    """Whether a step would raise an error about ignored labels."""
    try:
        refuse_ignored(batch, ignored)
    except InputError:
        return True
    return False
