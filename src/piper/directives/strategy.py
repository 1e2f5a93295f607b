"""A strategy: a list of directives that prints, compares, and saves to and loads from JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, overload

from piper.directives.base import Directive, known_directives
from piper.directives.json import decode, encode
from piper.directives.place import Place
from piper.directives.split import Split
from piper.errors import NoAttribute, Problem, StrategyError, did_you_mean, nearest
from piper.ir.filters import where
from piper.names import amount

MOST_NAME = 4096  # characters of the name of a file


@dataclass(frozen=True, slots=True)
class Strategy:
    """Directives, applied in the order given.

    >>> from piper.directives import Place, Split
    >>> from piper.ir.filters import where
    >>> print(Strategy([Place(where(PP=0), devices=[0]), Split("MB", 2)]))
    Place(filter=where(PP=0), devices=(0,), stream='pp')
    Split(name='MB', n=2)
    """

    directives: tuple[Directive, ...]

    def __init__(
        self, directives: Iterable[Directive | Iterable[Directive]], *others: Never
    ) -> None:
        if others or callable(getattr(directives, "rewrite", None)):
            what = f"it was given {amount(len(others) + 1, 'directive')}, and no list"
            raise StrategyError.of("strategy", what, LIST)
        object.__setattr__(self, "directives", tuple(flat(directives)))

    def __str__(self) -> str:
        return "\n".join(map(str, self.directives))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        found = next((html(self) for html, _ in _PICTURES), None)
        return f"<pre>{escape(str(self))}</pre>" if found is None else found

    def _repr_svg_(self) -> str | None:
        return next((svg(self) for _, svg in _PICTURES), None)

    def __add__(self, other: Directive | Iterable[Directive]) -> Strategy:
        return Strategy((*self.directives, *flat([other])))

    def __radd__(self, other: Iterable[Directive]) -> Strategy:
        return Strategy((*flat(other), *self.directives))

    def __iter__(self) -> Iterator[Directive]:
        return iter(self.directives)

    def __len__(self) -> int:
        return len(self.directives)

    @overload
    def __getitem__(self, place: int) -> Directive: ...

    @overload
    def __getitem__(self, place: slice) -> Strategy: ...

    def __getitem__(self, place: int | slice) -> Directive | Strategy:
        found = self.directives[place]
        return Strategy(found) if isinstance(found, tuple) else found

    if not TYPE_CHECKING:  # a type checker would allow any name

        def __getattr__(self, name: str) -> Any:
            fix = next((fix for fix, names in FIXES.items() if name in names), None)
            if fix is None:
                near = did_you_mean(nearest(name, dir(Strategy)))
                text = f"'Strategy' object has no attribute {name!r}{near}"
                raise AttributeError(text, name=name)
            raise NoAttribute.of("strategy", f"it has no {name}", fix)

    @property
    def devices(self) -> tuple[int, ...]:
        """Where something is placed."""
        places = (one for one in self.directives if isinstance(one, Place))
        return tuple(sorted({device for place in places for device in place.devices}))

    @property
    def microbatches(self) -> int:
        """The number of parts into which the batch is split."""
        return next((d.n for d in self.directives if isinstance(d, Split)), 1)

    def to_json(self, *unwanted: Never) -> str:
        """One directive per line, in the form of the published system.

        >>> Strategy.from_json(Strategy([Split("MB", 2)]).to_json()) == Strategy([Split("MB", 2)])
        True
        """
        if unwanted:
            text = f"write Path({str(unwanted[0])!r}).write_text(strategy.to_json())"
            raise StrategyError.of("strategy", "to_json returns a text, and takes nothing", text)
        lines = ",\n  ".join(json.dumps(encode(directive)) for directive in self.directives)
        return f"[\n  {lines}\n]\n" if lines else "[]\n"

    @staticmethod
    def from_json(text: str) -> Strategy:
        if Path(text[:MOST_NAME]).suffix == ".json":
            fix = f"give its text, Path({text!r}).read_text()"
            raise StrategyError.of("strategy", f"{text!r} is the name of a file", fix)
        try:
            objects = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"strategy, line {error.lineno}, column {error.colno}"
            raise StrategyError.of(
                where, f"this is not JSON: {error.msg}", "write a list of directives"
            ) from None
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number too long
            fix = "write a list of directives"
            raise StrategyError.of("strategy", f"it cannot be read: {error}", fix) from None
        if isinstance(objects, dict) and set(objects) == {"directives"}:
            objects = objects["directives"]
        if not isinstance(objects, list):
            raise StrategyError.of(
                "strategy", "the JSON is not a list", 'write [{"op": "place", ...}, ...]'
            )
        return Strategy(decode(one, f"directive {k}") for k, one in enumerate(objects, start=1))


ADD = "write strategy + [directive]: a strategy does not change"
SAVE = "write Path(name).write_text(strategy.to_json())"
LIST = "write one list: Strategy([Place(...), Split(...)])"
FIXES = {
    ADD: ("append", "add", "extend", "insert", "update", "add_directive"),
    "write a list of those that stay: [one for one in strategy if ...]": (
        "remove", "pop", "clear", "filter",
    ),
    SAVE: ("save", "dump", "write", "to_file", "export"),
    "write strategy.to_json(), which is a text": ("json", "dumps", "to_dict", "to_yaml", "asdict"),
    "write Strategy.from_json(Path(name).read_text())": ("load", "loads", "from_file", "read"),
}  # fmt: skip
Picture = Callable[[Strategy], str | None]
_PICTURES: list[tuple[Picture, Picture]] = []  # HTML and SVG, of a layer that knows schedules


def draw_with(html: Picture, svg: Picture) -> None:
    """Let notebooks show strategies so. Directives alone know no schedules."""
    _PICTURES[:] = [(html, svg)]


def flat(directives: Iterable[Any]) -> Iterator[Directive]:
    """Directives and lists of directives, as builders return them, as one sequence."""
    for item in directives:
        if isinstance(item, Strategy | list | tuple):
            yield from flat(item)
        elif isinstance(item, type) and hasattr(item, "rewrite"):
            fix = f"write {item.__name__}(...), with the parentheses"
            raise StrategyError.of("strategy", f"it has the class {item.__name__}", fix)
        elif callable(getattr(item, "rewrite", None)):
            yield item
        else:
            what = f"{short_text(item)} is not a directive"
            raise StrategyError("strategy", Problem(what, f"write {known_directives()}"))


def short_text(item: Any) -> str:
    """A value in a message. A tensor would fill pages.

    >>> short_text("gpipe"), short_text([0] * 99)
    ("'gpipe'", 'a value of type list')
    """
    text = repr(item)
    short = len(text) < 60 and text.isprintable()
    return text if short else f"a value of type {type(item).__name__}"


def as_strategy(
    strategy: Strategy | Sequence[Directive] | Callable[[int], Any] | None, devices: int = 1
) -> Strategy:
    """A strategy from what the user gave. None puts everything on one device.

    A function gets the number of devices.
    """
    if callable(strategy):
        refuse_uncalled(strategy)
        return as_strategy(strategy(devices))
    if strategy is None:
        return Strategy([Place(where(), devices=(0,))])
    if not isinstance(strategy, Iterable):
        fix = "write a list: strategy=[Place(...), Split(...)]"
        what = f"it is {short_text(strategy)}, and no list of directives"
        raise StrategyError.of("strategy", what, fix)
    return strategy if isinstance(strategy, Strategy) else Strategy(strategy)


SIZES = {"pp": 2, "microbatches": 8}  # an example of what builders need


def refuse_uncalled(function: Callable[[int], Any]) -> None:
    """A builder that was not called needs more than the number of devices."""
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    parameters = signature(function).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind in kinds]
    if len(needed) > 1:
        name = getattr(function, "__name__", "it")
        what = f"{name} is a function that needs {' and '.join(needed)}"
        fix = "give loss_fn before strategy, or call a builder: one_f_one_b(pp=2, microbatches=8)"
        if set(needed) <= SIZES.keys():  # it is one
            fix = f"call it: {name}({', '.join(f'{one}={SIZES[one]}' for one in needed)})"
        raise StrategyError.of("strategy", what, fix)
