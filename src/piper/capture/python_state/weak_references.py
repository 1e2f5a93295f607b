"""Weak references that a forward reads: whether their objects still live is nothing to compare."""

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import Tensor, nn

from piper.capture.python_state.reach import Reach
from piper.capture.python_state.snapshot import Snapshot

_LASTING = (nn.Module, Tensor, type, FunctionType, MethodType)  # of the model, or of a program


def weakly_held(state: Snapshot, reach: Reach) -> Iterator[str]:
    """The paths of weak references to objects that may end while the model is trained."""
    for place in state.places.values():
        if reach.reads(place.names) and any(
            not isinstance(one, _LASTING) for one in held(place.value)
        ):
            yield place.path


def held(value: Any) -> list[Any]:
    match value:
        case ReferenceType():
            found = [value()]
        case WeakSet():
            found = list(value)
        case WeakKeyDictionary():
            found = list(value.keys())
        case WeakValueDictionary():
            found = list(value.values())
        case _:
            found = []
    return [one for one in found if one is not None]
