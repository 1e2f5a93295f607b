"""All outputs of a model as one tensor, so that a plan can carry them like a loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.capture import torch_private
from piper.capture.trace.arguments.call_arguments import flatten
from piper.errors import CaptureError
from piper.names import with_article

Output = tuple[list[Any], Any]  # leaves, with (shape, dtype) for tensors, and their tree
KEPT = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def joined(output: Any, _: Any) -> Tensor:
    """In place of a loss function: all tensors of an output, one behind the other."""
    leaves, _ = flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        what = f"the model returns {with_article(type(output).__name__)} without tensors"
        raise CaptureError.of("predict", what, "return a tensor, or a structure of tensors")
    if not all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
        what = "the model returns a tensor whose size depends on data, as `x[mask]` does"
        raise CaptureError.of("predict", what, "return `x` and the mask")
    dtype = common_type([tensor.dtype for tensor in tensors])
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])


def common_type(types: Sequence[torch.dtype]) -> torch.dtype:
    """A type that holds all of them exactly; integers as far as float64 does."""
    if len(set(types)) == 1:
        return types[0]
    return torch.complex128 if any(one.is_complex for one in types) else torch.float64


def separated(
    described: Mapping[int, Output],
    parts: Sequence[Tensor],
    rows: Sequence[int],
    dimensions: Sequence[int | None],
) -> Any:
    """The output for all microbatches together, from what each of them gave.

    `rows` are those of each microbatch; `described` says what is given for so many rows, and
    `dimensions` where each tensor has them. What has no rows has one entry per microbatch.
    """
    leaves, spec = described[rows[0]]
    pairs = zip(parts, rows, strict=True)
    columns = zip(*(tensors(described[count], part) for part, count in pairs), strict=True)
    made = iter([whole(one, where) for one, where in zip(columns, dimensions, strict=True)])
    found = [next(made) if is_tensor(leaf) else constant(leaf) for leaf in leaves]
    return torch_private.pytree.tree_unflatten(found, spec)


def tensors(described: Output, part: Tensor) -> list[Tensor]:
    """The tensors of the output of one microbatch."""
    known = [leaf for leaf in described[0] if is_tensor(leaf)]
    flat = part.split([torch.Size(shape).numel() for shape, _ in known])
    return [one.to(dtype).reshape(shape) for one, (shape, dtype) in zip(flat, known, strict=True)]


def whole(parts: Sequence[Tensor], dimension: int | None) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.stack(list(parts)) if dimension is None else torch.cat(list(parts), dimension)


def constant(leaf: Any) -> Any:
    """Objects may hold tensors of the trace, such as caches: they are left out."""
    return leaf if isinstance(leaf, KEPT) else None


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], torch.dtype)
