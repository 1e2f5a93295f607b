"""Functions of the user that remember their results (`functools.lru_cache`): tables, masks.

A trace has tensors without values. A function must not remember these.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from piper.capture.python_state.ownership import is_own_module

_CACHE = type(functools.lru_cache(lambda: None))
_LOOKED_AT: dict[str, tuple[Any, bool]] = {}  # modules, and whether they are the user's


@contextmanager
def forgetting() -> Iterator[None]:
    """What functions remember inside is forgotten at the end."""
    before = {id(one): one.cache_info().misses for one in function_caches()}
    try:
        yield
    finally:
        for one in function_caches():
            if one.cache_info().misses != before.get(id(one), 0):
                one.cache_clear()


def function_caches() -> Iterator[Any]:
    """Those in the user's modules, and in classes there."""
    for module in own_modules():
        for value in list(vars(module).values()):
            yield from caches_in(value)


def own_modules() -> list[ModuleType]:
    """A program has thousands of modules, so each is looked at once."""
    found = []
    for name, module in list(sys.modules.items()):
        known = _LOOKED_AT.get(name)
        if known is None or known[0] is not module:
            is_own = isinstance(module, ModuleType) and is_own_module(module)
            known = _LOOKED_AT[name] = module, is_own
        if known[1]:
            found.append(module)
    return found


def caches_in(value: Any) -> Iterator[Any]:
    if type(value) is _CACHE:
        yield value
    elif isinstance(value, type):
        yield from (one for one in list(vars(value).values()) if type(one) is _CACHE)
