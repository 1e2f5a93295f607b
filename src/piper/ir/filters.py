"""Filters: how directives select parts of the DAG, by tags and never by node."""

from __future__ import annotations

from dataclasses import dataclass

from piper.errors import Problem, Refused
from piper.names import OF, PASS, B, F, Operation, Phase

ANY = "*"
Wanted = int | str | None  # an index, a phase, ANY, or None: not inside such a region


@dataclass(frozen=True, slots=True)
class Filter:
    """What a node's tags must be. Built by `where`; an empty filter matches every region."""

    items: tuple[tuple[str, Wanted], ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.items)

    def __str__(self) -> str:
        return f"where({', '.join(f'{key}={value!r}' for key, value in self.items)})"

    __repr__ = __str__


def accepts(wanted: Wanted, found: int | str | None) -> bool:
    """Whether one tag matches: `*` accepts any value, None only a missing tag."""
    return found is not None if wanted == ANY else found == wanted


def where(**tags: Wanted) -> Filter:
    """Select nodes by their tags: an index, `"*"` for any, None for outside such regions.

    >>> where(PP=1, MB=0, PASS="F")
    where(PP=1, MB=0, PASS='F')
    """
    return Filter(tuple((key, checked(key, value)) for key, value in tags.items()))


def checked(key: str, value: Wanted) -> Wanted:
    """Reject here what can never match, so that the error points to the user's line."""
    if key == PASS:
        if value not in (*Phase, *Operation) and value != ANY:
            fix = f"write one of {', '.join((*Phase, *Operation))}"
            raise Refused(Problem(f"{key}={value!r} is not a pass", fix))
        return str(value)
    if key == OF:
        if value not in (F, B):
            fix = f'write {OF}="{F}" for messages of a forward, {OF}="{B}" for those of a backward'
            raise Refused(Problem(f"{key}={value!r} is not a direction", fix))
        return str(value)
    if value is not None and value != ANY and type(value) is not int:
        fix = f'write {key}=0, {key}="*" or {key}=None ("-" in JSON)'
        raise Refused(Problem(f"{key}={value!r} is not an index", fix))
    return value
