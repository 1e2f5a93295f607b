"""Numbers that a forward reads from tensors by `.item()`: as an index, as text, by their class."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from piper.capture.source_lines import is_users

NUMBERS: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
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

    def __format__(self: Any, _: str) -> str:
        return str(self)

    for kind in NUMBERS:
        kind.__format__ = __format__
    try:
        yield
    finally:
        for kind in NUMBERS:
            del kind.__format__


@contextmanager
def numbers_of_python() -> Iterator[None]:
    """`isinstance(x.item(), float)` says what it says in eager training, to the user's code."""
    for kind, number in NUMBERS.items():
        kind.__getattribute__ = _with_class(number)
    try:
        yield
    finally:
        for kind in NUMBERS:
            del kind.__getattribute__


def _with_class(number: type) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:
        asked = name == "__class__" and _is_asked(sys._getframe(1))
        return number if asked else object.__getattribute__(self, name)

    return __getattribute__


def _is_asked(frame: FrameType) -> bool:
    """Whether the user's code asks for a class, itself or by one such as numbers.Number."""
    by_class = frame.f_code.co_name == "__instancecheck__" and frame.f_back is not None
    asking = frame.f_back if by_class else frame
    return asking is not None and is_users(asking.f_code.co_filename)
