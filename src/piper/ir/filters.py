"""Filters: how directives select parts of the DAG, by tags and never by node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Never

from piper.errors import Problem, Refused
from piper.names import OF, PASS, B, F, Operation, Phase

ANY = "*"
Several = tuple[int | str, ...] | range  # indices or phases, in rising order, each once
Wanted = int | str | None | Several  # an index, a phase, ANY, None (outside), or one of several
Given = Wanted | list[int] | list[str] | list[Phase]  # as the user writes it
Tag = int | str | None  # what a node has: an index, a phase, or nothing
SHORTEST_RANGE = 3  # shorter ones are printed as lists


@dataclass(frozen=True, slots=True)
class Filter:
    """What a node's tags must be. Built by `where`; an empty filter matches every region.

    `a | b`, `a & b` and `~a` combine filters.
    """

    items: tuple[tuple[str, Wanted], ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple([key for key, _ in self.items])

    def __or__(self, other: Filter) -> Filter:
        return either(self, other) if isinstance(other, Filter) else NotImplemented

    def __and__(self, other: Filter) -> Filter:
        return both(self, other) if isinstance(other, Filter) else NotImplemented

    def __invert__(self) -> Filter:
        return Not(self)

    def __bool__(self) -> bool:
        """`a and b` would silently be b."""
        fix = "write & for and, | for or, ~ for not"
        raise Refused(Problem(f"{self} is a filter, which is neither true nor false", fix))

    def __str__(self) -> str:
        return f"where({', '.join(f'{key}={written(value)}' for key, value in self.items)})"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, repr=False)
class Joined(Filter):
    """Filters that are joined."""

    items: tuple[tuple[str, Wanted], ...] = field(default=(), init=False)
    parts: tuple[Filter, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return keys_of(self.parts)


@dataclass(frozen=True, slots=True, repr=False)
class Either(Joined):
    """`a | b`: what any of these matches."""

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


@dataclass(frozen=True, slots=True, repr=False)
class Both(Joined):
    """`a & b`: what all of these match."""

    def __str__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, Either) else str(p) for p in self.parts)


@dataclass(frozen=True, slots=True, repr=False)
class Not(Filter):
    """`~a`: what this does not match."""

    items: tuple[tuple[str, Wanted], ...] = field(default=(), init=False)
    part: Filter

    @property
    def keys(self) -> tuple[str, ...]:
        return self.part.keys

    def __invert__(self) -> Filter:
        return self.part

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, Either | Both) else f"~{self.part}"


def keys_of(parts: Iterable[Filter]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for part in parts for key in part.keys))


def either(*parts: Filter) -> Filter:
    return Either(tuple(q for p in parts for q in (p.parts if isinstance(p, Either) else (p,))))


def both(*parts: Filter) -> Filter:
    return Both(tuple(q for p in parts for q in (p.parts if isinstance(p, Both) else (p,))))


def accepts(wanted: Wanted, found: Tag) -> bool:
    """Whether one tag matches: `*` accepts any value, None only a missing tag."""
    if isinstance(wanted, tuple | range):
        return found in wanted
    return found is not None if wanted == ANY else found == wanted


def fits(wanted: Filter, tags: Mapping[str, Tag]) -> bool:
    """Whether a filter matches a node with these tags."""
    match wanted:
        case Either():
            return any(fits(part, tags) for part in wanted.parts)
        case Both():
            return all(fits(part, tags) for part in wanted.parts)
        case Not():
            return not fits(wanted.part, tags)
        case Filter():
            return all(accepts(value, tags.get(key)) for key, value in wanted.items)


def where(*names: Never, **tags: Given) -> Filter:
    """Select nodes by their tags: an index, a list or range of indices, `"*"` for any, None for
    outside such regions. Combine filters with `|`, `&` and `~`.

    >>> where(PP=1, MB=0, PASS="F")
    where(PP=1, MB=0, PASS='F')
    >>> where(L=range(8)) & ~where(EP="*")
    where(L=range(0, 8)) & ~where(EP='*')
    """
    if names:
        raise Refused(no_tag(names[0]))
    return Filter(tuple((key, checked(key, value)) for key, value in tags.items()))


def no_tag(given: object) -> Problem:
    """
    >>> print(no_tag("layers.0"))
    where('layers.0') does not say which tag is meant
      fix: write where(TAG=INDEX), such as where(L=0); `piper show --dag` lists the tags of a model
    """
    if isinstance(given, Filter):
        return Problem(f"where({given}) is a filter already", "write & between two filters")
    if isinstance(given, str) and given in (*Phase, *Operation):
        return Problem(f"where({given!r}) does not say what {given} is", f'write {PASS}="{given}"')
    fix = "write where(TAG=INDEX), such as where(L=0); `piper show --dag` lists the tags of a model"
    return Problem(f"where({given!r}) does not say which tag is meant", fix)


def checked(key: str, value: Any) -> Wanted:
    """Reject here what can never match, so that the error points to the user's line."""
    if isinstance(value, list | tuple | range):
        return several(key, value)
    if key == PASS:
        return checked_pass(value)
    if key == OF:
        return checked_direction(value)
    if value is not None and value != ANY and type(value) is not int:
        fix = f'write {key}=0, {key}=[0, 1], {key}="*" or {key}=None ("-" in JSON)'
        if value in (*Phase, *Operation):
            fix = f'write {PASS}="{value}": {fix}'
        raise Refused(Problem(f"{key}={value!r} is not an index", fix))
    return value  # type: ignore[no-any-return]


def checked_pass(value: object) -> str:
    if value not in (*Phase, *Operation) and value != ANY:
        fix = f"write one of {', '.join((*Phase, *Operation))}"
        raise Refused(Problem(f"{PASS}={value!r} is not a pass", fix))
    return str(value)


def checked_direction(value: object) -> str:
    if value not in (F, B):
        fix = f'write {OF}="{F}" for messages of a forward, {OF}="{B}" for those of a backward'
        raise Refused(Problem(f"{OF}={value!r} is not a direction", fix))
    return str(value)


def several(key: str, values: list[Any] | tuple[Any, ...] | range) -> Wanted:
    """Equal sets are equal values: sorted, consecutive indices as a range, one as itself."""
    if not len(values):
        raise Refused(Problem(f"{key}={values!r} has no index in it", f"write {key}=[0, 1]"))
    if isinstance(values, range) and values.step == 1 and len(values) >= SHORTEST_RANGE:
        return values
    if any(value is None or value == ANY for value in values):
        fix = f'write {key}="*" alone, or join filters: where({key}=0) | where({key}=None)'
        raise Refused(Problem(f"{key}={values!r} has more than indices in it", fix))
    found: list[Any] = sorted({checked(key, value) for value in values})
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]
    if len(found) >= SHORTEST_RANGE and key != PASS and found[-1] - found[0] == len(found) - 1:
        return range(found[0], found[-1] + 1)
    return tuple(found)


def written(value: Wanted) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
