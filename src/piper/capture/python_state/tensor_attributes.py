"""Attributes that a program gives to tensors: `weight.scale = 2.0`."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from piper.capture import refusals
from piper.capture.python_state.code_search import line_that_changes
from piper.capture.python_state.places import Root
from piper.capture.python_state.reach import Reach
from piper.capture.torch_private import IS_PARAMETER
from piper.errors import InputError

_OF_TORCH = ("elem", IS_PARAMETER)  # of a tensor in a trace


def attribute_roots(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Root]:
    for path, tensor in tensors:
        for key in _own(tensor):
            yield Root(vars(tensor), key, f"{path}.{key}", (key,))


def _own(tensor: Tensor) -> dict[str, Any]:
    return {key: one for key, one in vars(tensor).items() if not key.startswith("_piper")}


@contextmanager
def attributes_lent(
    originals: Mapping[str, Tensor], others: Mapping[str, Tensor], reach: Reach
) -> Iterator[None]:
    """Give the tensors of a trace what the program gave to those that they stand for.

    What a forward changes there, the next one would not find.
    """
    for name, original in originals.items():
        vars(others[name]).update(_own(original))
    yield
    for name, original in originals.items():
        before, after = _own(original), _own(others[name])
        for key in {**before, **after}:
            if (
                key not in _OF_TORCH
                and reach.reads([key])
                and before.get(key) is not after.get(key)
            ):
                where = line_that_changes(key, reach.codes)
                raise refusals.changed_state(where, f"{name}.{key}", after.get(key))


def refuse_given(tensors: Iterable[Tensor], reach: Reach) -> None:
    """Attributes of a batch: a captured step gets nothing but values."""
    for key in (key for one in tensors for key in _own(one)):
        if reach.reads([key]):
            raise InputError.of(
                "batch",
                f"a tensor has an attribute {key!r}, which code of the model may read, and which a "
                "captured step would not have",
                "pass it as an argument of its own: a tensor, or a number",
            )
