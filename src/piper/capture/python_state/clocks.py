"""What gives another value each time: clocks, and random numbers without a seed.

A forward that asks a clock is traced again at other times, years and hours away. If it then
computes the same, it only measures.
"""

import datetime
import dis
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any

from piper.capture.python_state.code_search import line_that_changes
from piper.capture.python_state.places import Place, get, put
from piper.capture.python_state.reach import Reach
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.refusals import refusal
from piper.capture.source_lines import is_pythons, is_users, short_line
from piper.errors import CaptureError

LOG = logging.getLogger("piper")

_MODULES = frozenset({"time", "datetime", "secrets", "uuid"})
_NAMES = frozenset({
    "perf_counter", "perf_counter_ns", "time_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "clock_gettime", "now", "utcnow", "today", "urandom", "getrandom", "uuid1",
    "uuid4", "token_bytes", "token_hex", "randbits", "SystemRandom", "default_rng", "RandomState",
})  # fmt: skip

# Days and seconds ahead. With the present, no two days of a week follow each other without one of
# these, both halves of a day are among them, and odd and even seconds.
TIMES = (400 * 86_400 + 48_677.25, 3650 * 86_400 + 25_960.5, -1339 * 86_400 + 71_225.75)
MORE = tuple(map(float, range(12)))  # for bytes of the system: a forward may throw a coin
_TICK = 0.001  # seconds between two looks
_SECONDS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
_DATES = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}  # where the time is
_DATE, _DATETIME, _NOW, _LOCAL = datetime.date, datetime.datetime, time.time, time.localtime
_URANDOM = os.urandom
_WARNED: set[str] = set()  # lines

Function = Callable[..., Any]


def refuse_clocks(reach: Reach, before: Snapshot, is_same: Callable[[], bool]) -> None:
    """Trace at other times, if some code may ask. `is_same` traces, and compares with the first."""
    places = list(before.places.values())
    if not may_ask(reach, places):
        return
    times = OtherTimes()
    for ahead in (*TIMES, *MORE):
        with times.at(ahead, places):
            same = is_same()
        if not same:
            raise _read_clock((*times.lines, *times.warned, *_named_lines(reach)))
        if not (times.lines or times.warned) or (ahead == TIMES[-1] and not times.draws):
            break
    _warn(times.warned)


def may_ask(reach: Reach, places: Iterable[Place]) -> bool:
    """Whether some code names a clock, or holds one."""
    roots = (get(root.container, root.key) for root in reach.roots)
    held = (place.value for place in places)
    return any(map(_names_one, reach.codes)) or any(map(_is_clock, (*roots, *held)))


def _names_one(code: CodeType) -> bool:
    if not _NAMES.isdisjoint(code.co_names):
        return True
    return not _MODULES.isdisjoint(code.co_names) and any(
        one.opname == "IMPORT_NAME" and one.argval in _MODULES for one in dis.get_instructions(code)
    )


def _is_clock(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in _MODULES
    if isinstance(value, BuiltinFunctionType):
        of_dates = value.__self__ is _DATE or value.__self__ is _DATETIME
        return of_dates or value.__module__ == "time" or value is _URANDOM
    return value is _DATE or value is _DATETIME


@dataclass
class OtherTimes:
    """Clocks that are ahead, for the user's code. They differ by `TIMES`, and by nothing else."""

    ahead: float = 0.0
    looks: int = 0
    starts: dict[Any, Any] = field(default_factory=dict)  # of each clock, at the first look
    lines: list[str] = field(default_factory=list)  # that asked
    warned: list[str] = field(default_factory=list)  # those that asked for more than seconds
    draws: int = 0

    @contextmanager
    def at(self, ahead: float, places: Iterable[Place]) -> Iterator[None]:
        """Show another time inside. `places` are those that user's code reads."""
        self.ahead, self.looks, others = ahead, 0, dict(self.others())
        held = [one for one in places if _is_clock(one.value)]
        with ExitStack() as stack:
            for owner, name, new in self.replaced():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, new)
            for place in held:
                if (new := _instead(place.value, others)) is not None:
                    stack.callback(put, place.container, place.key, place.value)
                    put(place.container, place.key, new)
            yield

    def replaced(self) -> Iterator[tuple[Any, str, Any]]:
        for name in (*_SECONDS, *_DATES, *(f"{one}_ns" for one in _SECONDS)):
            if hasattr(time, name):
                yield time, name, self.function(name, getattr(time, name))
        yield datetime, "date", _dates(_DATE, self)
        yield datetime, "datetime", _dates(_DATETIME, self)
        yield os, "urandom", partial(self.drawn, _URANDOM)
        yield random, "_urandom", partial(self.drawn, _URANDOM)

    def others(self) -> Iterator[tuple[int, Any]]:
        """By the ids of the originals."""
        for owner, name, new in self.replaced():
            yield id(getattr(owner, name)), new

    def function(self, name: str, original: Function) -> Function:
        if name in _DATES:
            return partial(self.date, original, _DATES[name])
        return partial(self.seconds, original, 1_000_000_000 if name.endswith("_ns") else 1)

    def seconds(self, original: Function, unit: int, *given: Any) -> Any:
        if not self.is_asked(self.lines):
            return original(*given)
        start: Any = self.starts.setdefault((original, given), original(*given))
        return type(start)(start + self.passed() * unit)

    def date(self, original: Function, at: int, *given: Any) -> Any:
        if len(given) > at or not self.is_asked(self.warned):
            return original(*given)
        now = self.now()
        as_fields = original.__name__ in ("strftime", "asctime")
        return original(*given, _LOCAL(now) if as_fields else now)

    def drawn(self, original: Callable[[int], bytes], count: int) -> bytes:
        if not self.is_asked(self.warned):
            return original(count)
        self.draws += 1
        return random.Random(self.passed()).randbytes(count)  # noqa: S311

    def now(self) -> float:
        return float(self.starts.setdefault("now", _NOW())) + self.passed()

    def passed(self) -> float:
        self.looks += 1
        return self.ahead + self.looks * _TICK

    def is_asked(self, lines: list[str]) -> bool:
        """Whether the user's code asks. Then its line is remembered."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename == __file__ or is_pythons(frame)):
            frame = frame.f_back
        if frame is None or not is_users(frame.f_code.co_filename):
            return False
        lines.append(short_line(frame.f_code.co_filename, frame.f_lineno))
        return True


def _instead(value: Any, others: dict[int, Any]) -> Any:
    """What to hold in place of a clock. None: it is found in its module."""
    if id(value) in others:
        return others[id(value)]
    kind = getattr(value, "__self__", None)  # of a bound method of a class
    return getattr(others[id(kind)], value.__name__) if id(kind) in others else None


def _dates(kind: Any, times: OtherTimes) -> Any:
    """A class like `date` or `datetime`. All objects that it makes are of the original."""

    class Same(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kind)

        def __getattr__(cls, name: str) -> Any:
            return getattr(kind, name)

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    def now(*zone: Any, **given: Any) -> Any:
        if not times.is_asked(times.warned):
            return kind.now(*zone, **given)
        return kind.fromtimestamp(times.now(), *zone, **given)

    def today() -> Any:
        return kind.fromtimestamp(times.now()) if times.is_asked(times.warned) else kind.today()

    def utcnow() -> Any:
        return now(datetime.UTC).replace(tzinfo=None)

    own = {"__new__": made, "today": staticmethod(today)}
    if kind is _DATETIME:
        own |= {"now": staticmethod(now), "utcnow": staticmethod(utcnow)}
    return Same(kind.__name__, (), own)


def _named_lines(reach: Reach) -> Iterator[str]:
    for code in reach.codes:
        for name in sorted(_NAMES.intersection(code.co_names)):
            yield line_that_changes(name, [code])


def _read_clock(lines: tuple[str, ...]) -> CaptureError:
    return refusal(
        "".join(lines[:1]),
        "the forward computes with a clock or with random numbers of its own: at another time it "
        "gives another graph, and a captured step would always compute with the first value",
        "pass the value with the batch, as a tensor, or draw with torch.rand",
    )


def _warn(lines: list[str]) -> None:
    if new := [one for one in lines if one not in _WARNED]:
        _WARNED.update(new)
        LOG.warning(
            "%s: the forward asks for a date, or for random bytes of the system. A captured step "
            "does not ask again. It computed the same whenever Piper tried", new[0],
        )  # fmt: skip
