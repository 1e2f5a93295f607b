"""What gives another value each time: clocks, and random numbers without a seed."""

import dis
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any

from piper.capture.python_state.code_search import line_that_changes
from piper.capture.python_state.places import get
from piper.capture.python_state.reach import Reach
from piper.capture.refusals import refusal
from piper.errors import CaptureError

_MODULES = frozenset({"time", "datetime", "secrets", "uuid"})
_NAMES = frozenset({
    "perf_counter", "perf_counter_ns", "time_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "clock_gettime", "now", "utcnow", "today", "urandom", "getrandom", "uuid1",
    "uuid4", "token_bytes", "token_hex", "randbits", "SystemRandom", "default_rng", "RandomState",
})  # fmt: skip


def clock_in(reach: Reach) -> str:
    """The name by which code may read a clock. Empty: none does."""
    return next(_clocks(reach), "")


def _clocks(reach: Reach) -> Iterator[str]:
    for code in reach.codes:
        yield from sorted(_NAMES.intersection(code.co_names))
        if not _MODULES.isdisjoint(code.co_names):
            yield from _imported(code)
    for root in reach.roots:
        if _is_of_clocks(get(root.container, root.key)):
            yield str(root.key)


def _imported(code: CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME" and one.argval in _MODULES:
            yield one.argval


def _is_of_clocks(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in _MODULES
    return isinstance(value, BuiltinFunctionType) and value.__module__ == "time"


def read_clock(name: str, reach: Reach) -> CaptureError:
    return refusal(
        line_that_changes(name, reach.codes),
        "the forward computes with a clock or with random numbers of its own: a second trace gave "
        "another graph, and a captured step would always compute with the first value",
        "pass the value with the batch, as a tensor, or draw with torch.rand",
    )
