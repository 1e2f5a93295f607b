"""Numbers, texts and tensors that a module holds anywhere: in attributes, lists, other modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

DEEPEST = 6  # containers inside of each other
OF_TORCH = frozenset(vars(torch.nn.Module()))
PLAIN = (int, float, complex, str, bytes, bool, type(None))
Values = dict[str, Any]  # by where they are


def held_by(model: torch.nn.Module, apart: Iterable[torch.Tensor]) -> Values:
    """Copies of what it holds, without some tensors."""
    return dict(_values("", model, {id(one) for one in apart}, DEEPEST))


def different(old: Values, new: Values) -> Iterator[str]:
    """Where they differ."""
    for place in {**old, **new}:
        if place not in old or place not in new or not _same(old[place], new[place]):
            yield place


def _values(place: str, value: Any, seen: set[int], left: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, PLAIN):
        yield place, value
    elif id(value) in seen or not left:
        return
    elif isinstance(value, torch.Tensor):
        seen.add(id(value))
        yield place, value.detach().clone()
    else:
        seen.add(id(value))
        for name, one in _inside(value):
            yield from _values(f"{place}.{name}".lstrip("."), one, seen, left - 1)


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, torch.nn.Module):
        yield from value.named_parameters(recurse=False)
        yield from value.named_buffers(recurse=False)
        yield from value.named_children()
        yield from ((k, one) for k, one in vars(value).items() if k not in OF_TORCH)
    elif not isinstance(value, type) and not callable(value):
        yield from getattr(value, "__dict__", {}).items()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return type(one) is type(other) and bool(one == other)
