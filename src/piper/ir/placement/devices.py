"""A list of devices that is fast to hash and compare, for jobs with many devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from piper.names import Device


class Devices(tuple[Device, ...]):
    """A tuple that caches its hash, and compares by identity first.

    >>> Devices((0, 2)), Devices((0, 2)) == (0, 2), hash(Devices((0, 2))) == hash((0, 2))
    ((0, 2), True, True)
    """

    _hash: int | None = None
    _distinct: tuple[Device, ...] | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = tuple.__hash__(self)
        return self._hash

    @property
    def distinct(self) -> tuple[Device, ...]:
        """Each device once; the list itself if no device is in it twice."""
        if self._distinct is None:
            once = dict.fromkeys(self)
            self._distinct = self if len(once) == len(self) else Devices(once)
        return self._distinct

    def __eq__(self, other: Any) -> bool:
        return self is other or tuple.__eq__(self, other)

    def __ne__(self, other: Any) -> bool:
        return self is not other and tuple.__ne__(self, other)


def lists_once(lists: Iterable[tuple[Device, ...] | None]) -> tuple[tuple[Device, ...], ...]:
    """Each list once. Most nodes share theirs, so most are told apart without hashing them."""
    return tuple(dict.fromkeys({id(one): one for one in lists if one}.values()))
