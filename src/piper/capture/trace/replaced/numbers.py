"""Numbers that a forward reads from tensors by `.item()`: as an index, and as text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BASIC = (int, slice, torch.SymInt, type(None), type(Ellipsis))
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def is_number(index: Any) -> bool:
    """Whether it stands for a number that is known only when the graph runs."""
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype in INTEGERS
    return isinstance(index, torch.SymInt)


def selected(func: Any, tensor: Tensor, index: tuple[Any, ...], *value: Any) -> Any:
    """`tensor[index]`, where numbers are chosen by `select`, which takes them as they come."""
    if not all(isinstance(one, BASIC) or is_number(one) for one in index):
        return NotImplemented
    dim, rest, skipped = 0, list[Any](), tensor.dim() - sum(map(takes_dimension, index))
    for one in index:
        if is_number(one):
            tensor = tensor.select(dim, one.item() if isinstance(one, Tensor) else one)
            continue
        rest.append(one)
        dim += skipped if one is Ellipsis else int(takes_dimension(one))
    return func(tensor, tuple(rest), *value) if rest or value else tensor


def takes_dimension(index: Any) -> bool:
    return index is not None and index is not Ellipsis


def formatted(func: Any, tensor: Tensor, spec: str) -> Any:
    """A single number. Text has no values in a trace, as that of `.item()` has none."""
    return format(tensor.item(), spec) if spec and not tensor.dim() else NotImplemented


@contextmanager
def numbers_as_text() -> Iterator[None]:
    """A number without a value has a name, in any format: `f"{loss.item():.4f}"`."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for kind in kinds:
        kind.__format__ = lambda self, _: str(self)
    try:
        yield
    finally:
        for kind in kinds:
            del kind.__format__
