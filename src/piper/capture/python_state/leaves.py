"""Values that hold no others: what can be compared of them, before and after a trace."""

import random
import sys
from collections.abc import Iterator
from enum import Enum
from fractions import Fraction
from hashlib import sha256
from itertools import count
from pathlib import PurePath
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from piper.capture.torch_private import is_real, version_of

Token = tuple[Any, ...]

SIMPLE = (int, float, bool, str, bytes, complex, type(None))
_PRINTED = (Enum, torch.dtype, torch.device, torch.Size, range, slice, PurePath, Fraction, count)
SETS = (set, frozenset)


def token(value: Any) -> Token:
    """Two values with one token are the same to a program. Tensors are compared by identity."""
    kind = type(value)
    if kind in SIMPLE:
        return (kind.__name__, repr(value))  # by text: nan equals nan, and 1 is not True
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, SETS):
        return (kind.__name__, *sorted(map(repr, value)))
    if isinstance(value, _PRINTED):
        return (kind.__name__, repr(value))
    if isinstance(value, random.Random):
        return (kind.__name__, value.getstate())
    if isinstance(value, bytearray):
        return (kind.__name__, bytes(value))
    if isinstance(value, Iterator):
        return (kind.__name__, _position(value))
    if callable(value) and hasattr(value, "__qualname__"):  # a function or class of a library
        return (kind.__qualname__, str(getattr(value, "__module__", "")), value.__qualname__)
    return _of_numpy(value) or (kind.__qualname__,)


def is_tensor_token(found: Token) -> bool:
    return found[0] in ("tensor", "traced")


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers."""
    return isinstance(value, random.Random) or str(type(value).__module__).startswith(
        "numpy.random"
    )


def _of_tensor(value: Tensor) -> Token:
    if is_real(value):
        return ("tensor", id(value), version_of(value))
    return ("traced", tuple(value.shape), value.dtype)


def _position(value: Iterator[Any]) -> Any:
    """How far an iterator is, as far as Python says."""
    if isinstance(value, GeneratorType):
        return value.gi_frame and (value.gi_frame.f_lasti, repr(sorted(value.gi_frame.f_locals)))
    hint = getattr(value, "__length_hint__", None)
    if hint is not None:
        return hint()
    try:
        return repr(value.__reduce__()[1:])
    except Exception:  # it does not say
        return None


def _of_numpy(value: Any) -> Token | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        return ("array", value.shape, str(value.dtype), sha256(value.tobytes()).hexdigest())
    if isinstance(value, numpy.generic):
        return ("number", str(value.dtype), repr(value))
    if isinstance(value, numpy.random.Generator):
        return ("generator", repr(value.bit_generator.state))
    if isinstance(value, numpy.random.RandomState):
        return (
            "generator",
            repr([getattr(x, "tolist", lambda x=x: x)() for x in value.get_state()]),
        )
    return None
