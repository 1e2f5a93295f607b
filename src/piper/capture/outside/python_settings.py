"""Settings of Python and NumPy that code asks for by a function."""

import decimal
import gc
import locale
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Set
from typing import Any

Ask = Callable[[], Any]


def of_python(names: Set[str]) -> Iterator[tuple[str, Ask]]:
    """What code with these names may ask for."""
    for wanted, path, ask in _ASKED:
        if not wanted.isdisjoint(names):
            yield path, ask
    if {"random", "getstate"} <= names:
        yield "random.getstate()", random.getstate
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "geterr" in names:
        yield "numpy.geterr()", numpy.geterr
    if numpy is not None and "get_printoptions" in names:
        yield "numpy.get_printoptions()", lambda: repr(numpy.get_printoptions())
    if numpy is not None and {"random", "get_state"} <= names:
        yield "numpy.random.get_state()", lambda: repr(numpy.random.get_state())


def _loggers() -> dict[str, tuple[int, bool]]:
    """Those with a level of their own, by name. Others have that of the next one above."""
    known = logging.root.manager.loggerDict
    named = [(name, one) for name, one in known.items() if isinstance(one, logging.Logger)]
    return {
        name: (one.level, one.disabled)
        for name, one in (*named, ("root", logging.root))
        if one.level or one.disabled
    } | {"disabled": (logging.root.manager.disable, False)}


def _decimals() -> tuple[Any, ...]:
    """How decimals are rounded. The flags of a context tell what has happened."""
    now = decimal.getcontext()
    traps = [kind.__name__ for kind, on in now.traps.items() if on]
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, *sorted(traps)


_ASKED: tuple[tuple[Set[str], str, Ask], ...] = (
    ({"Decimal", "decimal", "getcontext"}, "decimal.getcontext()", _decimals),
    ({"getLogger"}, "the level of a logger", _loggers),
    ({"getcwd", "cwd"}, "os.getcwd()", os.getcwd),
    ({"getrecursionlimit"}, "sys.getrecursionlimit()", sys.getrecursionlimit),
    ({"getlocale", "localeconv"}, "locale.getlocale()", locale.getlocale),
    ({"isenabled"}, "gc.isenabled()", gc.isenabled),
    ({"get_threshold"}, "gc.get_threshold()", gc.get_threshold),
    ({"getswitchinterval"}, "sys.getswitchinterval()", sys.getswitchinterval),
    ({"current_thread"}, "the name of the thread", lambda: threading.current_thread().name),
)
