"""Values that hold no others: what can be compared of them, before and after a trace."""

import ctypes
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from fractions import Fraction
from gc import get_referents
from hashlib import sha256
from io import BytesIO, IOBase, StringIO
from itertools import chain, count
from logging import Logger
from marshal import dumps as marshalled
from pathlib import PurePath
from pickle import dumps as pickled
from types import GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor

from piper.capture.torch_private import is_real, memory_of, version_of

Token = tuple[Any, ...]

SIMPLE = (int, float, bool, str, bytes, complex, type(None))
_PRINTED = (Enum, torch.dtype, torch.device, torch.Size, range, slice, PurePath, Fraction, count)
SETS = (set, frozenset)
LONG = 64  # items from which a container of nothing but simple values is one value
_FLAT = frozenset(SIMPLE)
WHOLE, PARTS = (
    2**20,
    256,
)  # bytes of a tensor that are compared, and in how many parts of larger ones


def token(value: Any) -> Token:
    """Two values with one token are the same to a program. Tensors are compared by identity."""
    kind = type(value)
    if kind in SIMPLE:
        return (kind.__name__, repr(value))  # by text: nan equals nan, and 1 is not True
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, SETS):
        return (kind.__name__, *sorted(map(repr, value)))
    if isinstance(value, Enum):
        return (kind.__name__, repr(value), repr(sorted(vars(value).items(), key=str)))
    if isinstance(value, _PRINTED):
        return (kind.__name__, repr(value))
    if isinstance(value, random.Random):
        return (kind.__name__, value.getstate())
    if isinstance(value, bytearray):
        return (kind.__name__, bytes(value))
    if isinstance(value, IOBase):
        return (kind.__name__, *_of_file(value))
    if isinstance(value, Iterator):
        return (kind.__name__, _position(value))
    if callable(value) and hasattr(value, "__qualname__"):  # a function or class of a library
        return (kind.__qualname__, str(getattr(value, "__module__", "")), value.__qualname__)
    if isinstance(value, ModuleType):
        return ("module", value.__name__)
    if isinstance(value, Logger):
        return (kind.__name__, value.name, value.getEffectiveLevel(), value.disabled)
    if callable(getattr(value, "locked", None)):
        return (kind.__name__, value.locked())
    found = _of_optimizer(value) or _of_numpy(value) or _of_python(value) or _of_torch(value)
    return found or (kind.__qualname__,)


def is_opaque(value: Any) -> bool:
    """Whether little can be compared but which object it is."""
    return isinstance(value, torch.Generator) or token(value) == (type(value).__qualname__,)


def is_tensor_token(found: Token) -> bool:
    return found[0] in ("tensor", "traced")


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers."""
    return isinstance(value, random.Random) or str(type(value).__module__).startswith(
        "numpy.random"
    )


def _of_tensor(value: Tensor) -> Token:
    if is_real(value):
        return ("tensor", id(value), version_of(value), *_content(value), *_of_autograd(value))
    return ("traced", tuple(value.shape), value.dtype)


def _of_autograd(value: Tensor) -> Token:
    """Whether it needs a gradient, and the one that it has."""
    grad = value.grad if value.is_leaf else None
    return (value.requires_grad,) if grad is None else (True, id(grad), version_of(grad))


def _content(value: Tensor) -> Token:
    """Where its memory is, and a checksum: NumPy and `.data` write without a new version.

    To read from a GPU waits for it, so that is left out.
    """
    start, size = memory_of(value)
    if size <= WHOLE:
        return start, zlib.crc32(ctypes.string_at(start, size))
    part, found = WHOLE // PARTS, 0
    for at in range(0, size - part, size // PARTS):
        found = zlib.crc32(ctypes.string_at(start + at, part), found)
    return start, found


def _of_file(value: Any) -> Token:
    """Where it is, and what is in it if it is in memory."""
    with suppress(Exception):  # closed, or a pipe
        text = value.getvalue() if isinstance(value, StringIO | BytesIO) else ""
        data = text.encode() if isinstance(text, str) else text
        return value.tell(), sha256(data).hexdigest()
    return (value.closed,)


def _position(value: Iterator[Any]) -> Any:
    """How far an iterator is, as far as Python says."""
    if isinstance(value, GeneratorType):
        return value.gi_frame and (value.gi_frame.f_lasti, *_of_variables(value.gi_frame.f_locals))
    hint = getattr(value, "__length_hint__", None)
    if hint is not None:
        with suppress(TypeError):  # it has no end
            return hint()
    inner = list(map(_position, _inner(value)))
    try:
        return repr(value.__reduce__()[1:]), inner
    except Exception:  # it does not say
        return inner


def _inner(value: Iterator[Any]) -> list[Iterator[Any]]:
    """The iterators that another one takes its elements from. `zip` and `map` keep a tuple."""
    held = get_referents(value)
    held += [one for kept in held if type(kept) is tuple for one in kept]
    return [one for one in held if isinstance(one, Iterator) and one is not value]


def _of_variables(held: dict[str, Any]) -> list[Any]:
    """Simple values of some variables, and the classes of others."""
    rows = ((name, one if type(one) in SIMPLE else type(one)) for name, one in held.items())
    return sorted(map(repr, rows))


def _of_optimizer(value: Any) -> Token | None:
    """The options of an optimizer, and what a scheduler counts. Their tensors are no state here."""
    if isinstance(value, torch.optim.Optimizer):
        options = ([*group.items()] for group in value.param_groups)
        return (
            type(value).__name__,
            repr([[(key, one) for key, one in group if key != "params"] for group in options]),
        )
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        lists = {name: one for name, one in vars(value).items() if isinstance(one, list)}
        return (type(value).__name__, repr(lists), *_of_variables(vars(value)))
    return None


def _of_numpy(value: Any) -> Token | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return ("array", value.shape, str(value.dtype), repr(value.tolist()))
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


def _of_python(value: Any) -> Token | None:
    """Values of Python's own classes, such as dates and decimals, and what has raw memory."""
    kind = type(value)
    if str(kind.__module__).split(".")[0] not in sys.stdlib_module_names:
        return None
    with suppress(TypeError, ValueError, BufferError):
        return (kind.__qualname__, sha256(memoryview(value).cast("B")).hexdigest())
    with suppress(Exception):  # it says how to copy it, or that it cannot be copied
        return (kind.__qualname__, sha256(pickled(value, protocol=4)).hexdigest())
    return None


def _of_torch(value: Any) -> Token | None:
    """The seed of a generator, the scale of a GradScaler."""
    kind = type(value)
    if isinstance(value, torch.Generator):
        return (kind.__name__, value.initial_seed())
    if str(kind.__module__).startswith("torch."):
        with suppress(Exception):
            return (kind.__qualname__, repr(value.state_dict()))
    return None


def is_flat(value: Any) -> bool:
    """Whether a container is long and holds nothing but numbers and texts, also in tuples."""
    if type(value) not in (list, tuple, dict, deque) or len(value) < LONG:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    kinds = set(map(type, items))
    if tuple in kinds:
        inner = chain.from_iterable(one for one in items if type(one) is tuple)
        kinds = kinds - {tuple} | set(map(type, inner))
    return kinds <= _FLAT


def of_flat(value: Any) -> Token:
    """A long list of 100,000 numbers has one token, not 100,000."""
    plain = list(value) if isinstance(value, deque) else value
    return (type(value).__name__, len(value), sha256(marshalled(plain, 2)).hexdigest())
