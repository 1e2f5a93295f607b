"""How directives name a part of the DAG: by tags, never by node."""

from __future__ import annotations

from dataclasses import dataclass

from piper.errors import Problem, Refused
from piper.names import PASS, Phase

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
    """Whether one tag fits one wish: `*` wants any, None wants none."""
    return found is not None if wanted == ANY else found == wanted


def where(**tags: Wanted) -> Filter:
    """Name the nodes whose tags are these: an index, `"*"` for any, None for no such region.

    >>> where(PP=1, MB=0, PASS="F")
    where(PP=1, MB=0, PASS='F')
    """
    return Filter(tuple((key, checked(key, value)) for key, value in tags.items()))


def checked(key: str, value: Wanted) -> Wanted:
    """Refuse at once what can match nothing, so that the error points to the user's line."""
    if key == PASS:
        if value not in tuple(Phase) and value != ANY:
            raise Refused(
                Problem(f"{key}={value!r} is no pass", f"write one of {', '.join(Phase)}")
            )
        return str(value)
    if value is not None and value != ANY and type(value) is not int:
        raise Refused(
            Problem(
                f"{key}={value!r} is no index", f'write {key}=0, {key}="*" or None ("-" in JSON)'
            )
        )
    return value
