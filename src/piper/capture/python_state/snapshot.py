"""All Python state that a forward can reach, at one time; and how two of them differ."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from torch import nn

from piper.capture.python_state.leaves import Token, is_tensor_token, token
from piper.capture.python_state.places import (
    ABSENT,
    Place,
    Walk,
    children,
    contents,
    contents_among,
    get,
    is_leaf,
    items_of,
    put,
)
from piper.capture.python_state.reach import Reach
from piper.capture.torch_private import own_modules

Key = tuple[str, int]  # a path, and a number: closures may have the same names


@dataclass(frozen=True, slots=True)
class Change:
    """A place that differs. None: it is not there."""

    before: Place | None
    after: Place | None

    @property
    def place(self) -> Place:
        found = self.after or self.before
        assert found is not None
        return found


class Snapshot:
    """Places with the tokens that their values have now."""

    def __init__(self, reach: Reach) -> None:
        walk, again = Walk(), Counter[str]()
        self.tokens: dict[Key, Token] = {}
        self.places: dict[Key, Place] = {}
        self.orders: dict[Key, list[Any]] = {}  # the keys of dicts, and the children of modules
        for place in walk.of(reach.roots):
            key = place.path, again[place.path]
            again[place.path] += 1
            self.tokens[key], self.places[key] = (*place.token, *which(place, walk)), place
            if isinstance(place.value, dict):
                self.orders[key] = [key for key, _ in items_of(place.value)]
            elif isinstance(place.value, nn.Module):
                self.orders[key] = [*own_modules(place.value).values()]
        self.holders = [(one, children(one.value)) for one in walk.seen.values()]
        self.roots = [(root, get(root.container, root.key)) for root in reach.roots]

    def values(self) -> list[Any]:
        return [place.value for place in self.places.values()]

    def changes(self, after: "Snapshot") -> Iterator[Change]:
        """What differs in a later snapshot."""
        for key in {**self.tokens, **after.tokens}:
            if self.tokens.get(key) != after.tokens.get(key):
                yield Change(self.places.get(key), after.places.get(key))

    def reordered(self, after: "Snapshot") -> Iterator[Place]:
        """Dicts with the same keys in another order, and modules with the same children."""
        for key, order in self.orders.items():
            now = after.orders.get(key, order)
            if now != order and {*map(id, now)} == {*map(id, order)}:
                yield after.places[key]

    def differences(self, after: "Snapshot") -> Iterator[Change]:
        """The same, and dicts with the same keys in another order."""
        yield from self.changes(after)
        for place in self.reordered(after):
            yield Change(place, place)

    def same_tokens(self, after: "Snapshot") -> Iterator[tuple[Place, Place]]:
        """Places of which nothing seems to differ, in both."""
        for key, one in self.tokens.items():
            if after.tokens.get(key) == one:
                yield self.places[key], after.places[key]

    def traced(self) -> list[Place]:
        """The places that hold tensors of a trace, which end with it."""
        return [self.places[key] for key, one in self.tokens.items() if one[0] == "traced"]

    def restore(self) -> None:
        """Put everything back, so that a trace leaves nothing behind."""
        for root, value in self.roots:
            if get(root.container, root.key) is not value:
                put(root.container, root.key, value)
        for place, before in self.holders:
            if not _is_same(children(place.value), before):
                _restore(place.value, contents_among(place.value, before))
        for value, state in self.generators:
            if token(value) != state:
                value.setstate(state[1])

    @cached_property
    def generators(self) -> list[tuple[Any, Token]]:
        """Those of random numbers, say. What they held is in their tokens."""
        return [
            (one.value, self.tokens[key])
            for key, one in self.places.items()
            if is_leaf(one.value)
            and not is_tensor_token(self.tokens[key])
            and hasattr(one.value, "setstate")
        ]


def which(place: Place, walk: Walk) -> Token:
    """Which object it is, where what it holds does not say so: a module with parameters, or one
    that was met before, by its first path. `self.head` may be another one of `self.heads`."""
    value = place.value
    if is_leaf(value):
        return ()
    if (
        isinstance(value, nn.Module)
        and next(chain(value.parameters(), value.buffers()), None) is not None
    ):
        return ("module", id(value))
    first = walk.seen.get(id(value))
    return () if first is None else ("as", first.path)


def _is_same(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    return len(now) == len(before) and all(
        a is b and one == other if isinstance(one, str | int) else a is b
        for (one, a), (other, b) in zip(now, before, strict=True)
    )


def _restore(holder: Any, before: list[tuple[Any, Any]]) -> None:
    if _is_same(contents(holder), before):
        return
    match holder:
        case list():
            holder[:] = [value for key, value in before if isinstance(key, int)]
        case deque():
            holder.clear()
            holder.extend(value for key, value in before if isinstance(key, int))
        case _:
            known = {key for key, _ in before}
            for key, _ in contents(holder):
                if key not in known:
                    put(holder, key, ABSENT)
            for key, value in before:
                put(holder, key, value)
