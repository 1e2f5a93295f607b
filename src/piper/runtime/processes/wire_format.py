"""Values that processes send each other, as bytes: JSON, then the contents of tensors.

Reading them runs no code, even if a stranger sent them: unlike a pickle, they name no function. The
classes among them are Piper's own, which say so with `@travels`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any, TypeVar

import torch

LENGTH = 8  # bytes that say how long the JSON is
ALIGNED = 16  # bytes: where a tensor may begin
Class = TypeVar("Class", bound=type)
_CLASSES: dict[str, type] = {}  # that travel, by name
_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
_NAMES = {one: name for name, one in _DTYPES.items()}


def travels(cls: Class) -> Class:
    """Processes may send each other values of this dataclass or named tuple."""
    assert (is_dataclass(cls) or issubclass(cls, tuple)) and cls.__name__ not in _CLASSES
    _CLASSES[cls.__name__] = cls
    return cls


def to_bytes(value: Any) -> torch.Tensor:
    """The bytes of a value, in a tensor on the CPU."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(encoded(value, tensors), separators=(",", ":")).encode()
    head = len(text).to_bytes(LENGTH, "little") + text
    parts = [torch.frombuffer(bytearray(padded(head)), dtype=torch.uint8)]
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [content, content.new_zeros(-len(content) % ALIGNED)]
    return torch.cat(parts)


def from_bytes(content: torch.Tensor) -> Any:
    """The value. What is not such a value is a ValueError."""
    length = int.from_bytes(raw(content[:LENGTH]), "little")
    if not 0 < length <= len(content) - LENGTH:
        raise ValueError("a message is not as long as it says")
    try:
        found = json.loads(raw(content[LENGTH : LENGTH + length]))
        return decoded(found, Tensors(content, LENGTH + length))
    except (TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"a message is damaged ({error})") from None


def raw(content: torch.Tensor) -> bytes:
    """torch can do without numpy."""
    return ctypes.string_at(content.data_ptr(), content.nbytes)


def padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % ALIGNED)


class Tensors:
    """The tensors after the JSON of a message, one after the other."""

    def __init__(self, content: torch.Tensor, end: int) -> None:
        self.content, self.at = content, end + -end % ALIGNED

    def next(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        size = prod(shape) * dtype.itemsize
        found = self.content[self.at : self.at + size]
        if min((0, *shape)) < 0 or len(found) != size:
            raise ValueError("a tensor is not as long as its shape")
        self.at += size + -size % ALIGNED
        return found.clone().view(dtype).view(tuple(shape))


def encoded(value: Any, tensors: list[torch.Tensor]) -> Any:
    """JSON of a value. Its tensors are added to the list.

    >>> encoded({"a": (1, None), 2: torch.bool}, [])
    {'dict': [['a', {'tuple': [1, None]}], [2, {'dtype': 'bool'}]]}
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value
        case list():
            return [encoded(one, tensors) for one in value]
        case dict():
            return {"dict": [[encoded(k, tensors), encoded(v, tensors)] for k, v in value.items()]}
        case set() | frozenset():
            return {"set": [encoded(one, tensors) for one in value]}
        case torch.dtype():
            return {"dtype": _NAMES[value]}
        case torch.Tensor():
            tensors.append(value)
            return {"tensor": [_NAMES[value.dtype], list(value.shape)]}
        case tuple() if type(value) in (tuple, torch.Size):
            return {"tuple": [encoded(one, tensors) for one in value]}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise TypeError(f"objects of the class {name} do not travel between processes")
    return {"class": [name, [encoded(one, tensors) for one in contents(value)]]}


def contents(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple):
        return value
    return [getattr(value, field.name) for field in fields(value)]


def decoded(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [decoded(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _DECODERS[kind](content, tensors)


def decoded_dtype(name: str, _: Tensors) -> torch.dtype:
    return _DTYPES[name]


def decoded_tensor(row: tuple[str, list[int]], tensors: Tensors) -> torch.Tensor:
    name, shape = row
    return tensors.next(_DTYPES[name], shape)


def decoded_class(row: tuple[str, list[Any]], tensors: Tensors) -> Any:
    name, content = row
    return _CLASSES[name](*(decoded(one, tensors) for one in content))


def decoded_dict(rows: list[tuple[Any, Any]], tensors: Tensors) -> dict[Any, Any]:
    return {decoded(key, tensors): decoded(value, tensors) for key, value in rows}


_DECODERS: dict[str, Callable[[Any, Tensors], Any]] = {
    "dict": decoded_dict,
    "set": lambda rows, tensors: {decoded(one, tensors) for one in rows},
    "tuple": lambda rows, tensors: tuple(decoded(one, tensors) for one in rows),
    "dtype": decoded_dtype,
    "tensor": decoded_tensor,
    "class": decoded_class,
}
