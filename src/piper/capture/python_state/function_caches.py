"""Functions of the user that remember their results (`functools.lru_cache`): tables, masks.

A trace has tensors without values. A function must not remember these.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from piper.capture.python_state.ownership import is_own_module, is_users_class

_CACHE = type(functools.lru_cache(lambda: None))
_SEEN: list[Any] = []  # modules, as they were at the last look
_OWN: list[ModuleType] = []  # those of the user among them


@contextmanager
def forgetting(known: list[Any] | None = None) -> Iterator[None]:
    """What functions remember inside is forgotten at the end. `known`: no others are there."""
    first = function_caches() if known is None else known
    before = {id(one): one.cache_info().misses for one in first}
    try:
        yield
    finally:
        for one in function_caches() if known is None else known:
            if one.cache_info().misses != before.get(id(one), 0):
                one.cache_clear()


def function_caches() -> list[Any]:
    """Those in the user's modules, and in classes there, but for torch's and Python's.

    Many modules import the same classes. Each trace asks twice, so this must be fast.
    """
    values = [one for module in own_modules() for one in list(vars(module).values())]
    found = [one for one in values if type(one) is _CACHE]
    classes = {id(one): one for one in values if isinstance(one, type)}
    for one in filter(is_users_class, classes.values()):
        found += [inner for inner in list(vars(one).values()) if type(inner) is _CACHE]
    return found


def own_modules() -> list[ModuleType]:
    """A program has thousands of modules: they are looked at again if there are others."""
    modules = list(sys.modules.values())
    if modules != _SEEN:  # modules are equal if they are the same
        _SEEN[:] = modules
        _OWN[:] = [one for one in modules if isinstance(one, ModuleType) and is_own_module(one)]
    return _OWN
