"""All outputs of a model as one tensor, so that a plan can carry them like a loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper.capture import torch_private
from piper.capture.trace.call_arguments import flatten
from piper.errors import CaptureError

Output = tuple[list[Any], Any]  # leaves, with (shape, dtype) for tensors, and their tree
KEPT = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def joined(output: Any, _: Any) -> Tensor:
    """In place of a loss function: all tensors of an output, one behind the other."""
    leaves, _ = flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        what = f"the model returns a {type(output).__name__} without tensors"
        raise CaptureError.of("predict", what, "return a tensor, or a structure of tensors")
    dtype = common_type([tensor.dtype for tensor in tensors])
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])


def common_type(types: Sequence[torch.dtype]) -> torch.dtype:
    """A type that holds all of them exactly; integers as far as float64 does."""
    if len(set(types)) == 1:
        return types[0]
    return torch.complex128 if any(one.is_complex for one in types) else torch.float64


def separated(described: Output, parts: Sequence[Tensor], rows: int) -> Any:
    """The output for all microbatches together, from what each of them gave.

    `rows` is the number of rows in a microbatch. What has no rows has one entry per microbatch.
    """
    leaves, spec = described
    shapes = [leaf for leaf in leaves if is_tensor(leaf)]
    sizes = [torch.Size(shape).numel() for shape, _ in shapes]
    columns = zip(*(part.split(sizes) for part in parts), strict=True)
    made = iter([whole(known, one, rows) for known, one in zip(shapes, columns, strict=True)])
    found = [next(made) if is_tensor(leaf) else constant(leaf) for leaf in leaves]
    return torch_private.pytree.tree_unflatten(found, spec)


def whole(known: tuple[Any, torch.dtype], parts: Sequence[Tensor], rows: int) -> Tensor:
    shape, dtype = known
    own = [part.to(dtype).reshape(shape) for part in parts]
    if len(own) == 1:
        return own[0]
    return torch.cat(own) if shape[:1] == (rows,) else torch.stack(own)


def constant(leaf: Any) -> Any:
    """Objects may hold tensors of the trace, such as caches: they are left out."""
    return leaf if isinstance(leaf, KEPT) else None


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], torch.dtype)
