"""Values of Python as JSON, and back: numbers, texts, bytes, tensors, and what is made of them."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piper.names import with_article
from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.format.safetensors_format import bytes_of, tensor_of
from piper.runtime.checkpoint.format.strict_values import count


def encoded(value: Any, where: str) -> Any:
    """JSON of a value. `where` is whose value it is, for errors.

    >>> encoded({"epoch": 1, 2: (b"a", None)}, "x")
    {'dict': [['epoch', 1], [2, {'tuple': [{'bytes': 'YQ=='}, None]}]]}
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if type(value) in (int, float):
            return value
        case bytes() | bytearray():
            return {"bytes": base64.b64encode(value).decode()}
        case list():
            return [encoded(one, where) for one in value]
        case tuple():
            return {"tuple": [encoded(one, where) for one in value]}
        case Mapping():
            rows = [[encoded(k, where), encoded(v, where)] for k, v in value.items()]
            return {"dict": rows}
        case torch.Tensor():
            return {"tensor": tensor_row(value)}
    if is_array(value):
        return {"array": [encoded(value.item() if not value.shape else value.tolist(), where),
                          str(value.dtype), list(value.shape)]}  # fmt: skip
    raise refused(
        f"{where} contains {with_article(type(value).__name__)}, which cannot be saved safely",
        "keep only numbers, texts, bytes, tensors, and lists, tuples and dicts of them",
    )


def tensor_row(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous()
    content = base64.b64encode(bytes(bytes_of(flat))).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]


def is_array(value: Any) -> bool:
    """Of numpy, if the script uses it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def decoded(value: Any) -> Any:
    """
    >>> decoded(encoded({"epoch": 1, 2: (b"a", None)}, "x"))
    {'epoch': 1, 2: (b'a', None)}
    """
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return DECODERS[kind](content)


def decoded_tensor(row: list[Any]) -> torch.Tensor:
    dtype, shape, content = row
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no type {dtype}")
    return tensor_of(bytearray(base64.b64decode(content)), found, [*map(count, shape)])


def decoded_array(row: list[Any]) -> Any:
    import numpy

    content, dtype, shape = row
    return numpy.array(decoded(content), dtype=dtype).reshape(shape)


DECODERS: dict[str, Callable[[Any], Any]] = {
    "bytes": base64.b64decode,
    "tuple": lambda rows: tuple(map(decoded, rows)),
    "dict": lambda rows: {decoded(key): decoded(value) for key, value in rows},
    "tensor": decoded_tensor,
    "array": decoded_array,
}
