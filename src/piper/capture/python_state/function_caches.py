"""Functions of the user that remember their results (`functools.lru_cache`): tables, masks.

A trace has tensors without values. A function must not remember these.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakSet

from piper.capture.python_state.ownership import is_own_module, is_users_class

_CACHE = type(functools.lru_cache(lambda: None))
_MET: WeakSet[Any] = WeakSet()  # caches in attributes of models, and in closures
_SEEN: list[Any] = []  # modules, as they were at the last look
_OWN: list[ModuleType] = []  # those of the user among them


@dataclass
class Found:
    """The caches that were found, and how many modules and met ones there were then."""

    caches: list[Any]
    modules: int

    @staticmethod
    def now() -> "Found":
        return Found(function_caches(), len(sys.modules) + len(_MET))


_OPEN: list[Found] = []  # by the outermost `forgetting`, or `looking_once`
_TOGETHER: list[bool] = []  # inside of `looking_once`


@contextmanager
def forgetting() -> Iterator[None]:
    """What functions remember inside is forgotten at the end.

    All modules are looked at by the outermost one, and by those inside if there are new modules.
    """
    outermost, first = not _OPEN, known()
    _OPEN[:] = [first]
    before = {id(one): one.cache_info().misses for one in first.caches}
    try:
        yield
    finally:
        _OPEN[:] = [Found.now() if outermost and not _TOGETHER else known()]
        _forget(before)
        if outermost and not _TOGETHER:
            _OPEN.clear()


@contextmanager
def looking_once() -> Iterator[None]:
    """Around several `forgetting`: all modules are looked at by the first one, and at the end.

    Caches that are new at the end are cleared then. Between them, functions may remember anything.
    """
    if _OPEN or _TOGETHER:
        yield
        return
    _TOGETHER.append(True)
    try:
        yield
    finally:
        _TOGETHER.clear()
        if _OPEN:
            before = {id(one): one.cache_info().misses for one in _OPEN[0].caches}
            _OPEN[:] = [Found.now()]
            _forget(before)
            _OPEN.clear()


def _forget(before: dict[int, int]) -> None:
    for one in _OPEN[0].caches:
        if one.cache_info().misses != before.get(id(one), 0):
            one.cache_clear()


def known() -> Found:
    is_new = not _OPEN or _OPEN[0].modules != len(sys.modules) + len(_MET)
    return Found.now() if is_new else _OPEN[0]


def meet(value: Any) -> None:
    """Something that a model holds: no module has it if it is a function of a function."""
    if type(value) is _CACHE:
        _MET.add(value)


def function_caches() -> list[Any]:
    """Those in the user's modules, and in classes there, but for torch's and Python's; and those
    that were met in models.

    Many modules import the same classes. Each trace asks twice, so this must be fast.
    """
    found, classes = list(_MET), dict[int, type]()
    for module in own_modules():
        for one in list(vars(module).values()):
            kind = type(one)  # `isinstance` would ask each object for its `__class__`, too
            if kind is _CACHE:
                found.append(one)
            elif issubclass(kind, type):
                classes[id(one)] = one
    for one in filter(is_users_class, classes.values()):
        found += [inner for inner in list(vars(one).values()) if type(inner) is _CACHE]
    return [one for one in {id(one): one for one in found}.values() if not _is_pipers(one)]


def _is_pipers(function: Any) -> bool:
    """Also where the user's code imports it."""
    module = str(function.__module__)
    return module.startswith("piper.") and not module.startswith("piper.models")


def own_modules() -> list[ModuleType]:
    """A program has thousands of modules: they are looked at again if there are others."""
    modules = list(sys.modules.values())
    if modules != _SEEN:  # modules are equal if they are the same
        _SEEN[:] = modules
        _OWN[:] = [one for one in modules if isinstance(one, ModuleType) and is_own_module(one)]
    return _OWN
