"""Random outputs of a model, for trials of its loss."""

from __future__ import annotations

from typing import Any

import torch

from piper.runtime.batch import part_of
from piper.runtime.torch_private import pytree

MOST = 2**25  # elements to try; of larger outputs, fewer samples and tokens
Output = tuple[list[Any], Any]  # leaves, (shape, dtype) for tensors, and their nesting


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


class MeanOfRows(Unbatched):
    """One that is a mean over rows: of two halves, each has its own."""

    __slots__ = ()


class SumOfRows(MeanOfRows):
    """Or a sum over them."""

    __slots__ = ()


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


def most_rows(leaves: list[Any], samples: int) -> int:
    """Of each of two halves, if outputs have so many elements for so many samples."""
    return MOST * samples // max(1, 2 * sum(map(numel, leaves)))


def numel(leaf: Any) -> int:
    return torch.Size(leaf[0]).numel() if is_tensor(leaf) else 0


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], torch.dtype)


def is_batched(leaf: Any, samples: int) -> bool:
    """Whether an output has a batch dimension. A single number has none."""
    batched = is_tensor(leaf) and not isinstance(leaf, Unbatched) and leaf[0][:1] == (samples,)
    return batched and torch.Size(leaf[0]).numel() > 1


def like(
    leaf: Any,
    samples: int,
    wanted: int,
    draw: torch.Generator,
    device: torch.device,
    kind: torch.dtype = torch.float32,
) -> Any:
    """Random values for an output, for `wanted` samples if it is batched."""
    if not is_tensor(leaf):
        return leaf
    shape, dtype = leaf
    if is_batched(leaf, samples):
        shape = (wanted, *shape[1:])
    if isinstance(leaf, MeanOfRows):
        return (torch.rand(2, *shape, generator=draw, dtype=kind) + 0.1).to(device)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    made = torch.randn(shape, generator=draw, dtype=kind) + 0.3
    if is_batched(leaf, samples):  # so that the halves differ
        made *= torch.linspace(0.5, 3.0, wanted, dtype=kind).view(-1, *[1] * (len(shape) - 1))
    return made.to(device)


def drawn_integers(made: Any, nth: int) -> Any:
    """Truths and small integers in place of zeros: half of the first rows, and all of the others,
    or none.

    >>> drawn_integers(torch.zeros(4, dtype=torch.bool), 0).tolist()
    [True, False, True, True]
    """
    if not isinstance(made, torch.Tensor) or made.is_floating_point() or made.is_complex():
        return made
    half = len(made) // 2 if made.dim() else 0
    if not half:
        return torch.full_like(made, nth % 2)
    drawn = torch.full_like(made, (nth + 1) % 2)
    drawn[:half] = 1
    drawn[:half].view(-1)[1::2] = 0
    return drawn


def has_integers(output: Output) -> bool:
    return any(is_tensor(leaf) and not leaf[1].is_floating_point for leaf in output[0])


def small(made: Any, leaf: Any, samples: int) -> Any:
    """In the first half, as after long training: `(loss - 0.1).abs()` is another function there."""
    if is_batched(leaf, samples):
        made[: len(made) // 2] *= 1e-3
    return made


def cut(made: Any, leaf: Any, samples: int, part: int, parts: int) -> Any:
    if isinstance(leaf, MeanOfRows):
        return (
            made[part]
            if parts > 1
            else made.sum(0)
            if isinstance(leaf, SumOfRows)
            else made.mean(0)
        )
    return part_of(made, part, parts) if is_batched(leaf, samples) else made
