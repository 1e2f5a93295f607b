"""What a directive is, and the list of all directives.

A new directive is one file: a frozen dataclass under `@directive`, with its `rewrite:` picture.
JSON, messages, the docs check and the round-trip test find it in `DIRECTIVES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints, runtime_checkable

from piper.directives.codecs import Codec, codec_of
from piper.errors import Problem, Refused, meant_by, nearest, wrong_call
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.maker import Maker


class Directive(Protocol):
    """What a user writes: a frozen dataclass, and a pure rewrite of the DAG."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def rewrite(self, dag: Dag) -> Dag: ...


@runtime_checkable
class Batched(Protocol):
    """A directive that applies a run of its kind as one rewrite, for programs of thousands."""

    @staticmethod
    def rewrite_all(named: Sequence[tuple[Maker, Any]], dag: Dag) -> Dag: ...


D = TypeVar("D", bound=Directive)
JsonObject = Mapping[str, Any]  # a directive as JSON has it


def unchanged(given: JsonObject) -> JsonObject:
    return given


@dataclass(frozen=True, slots=True)
class Entry:
    """One directive of the list: its class, and how JSON writes it."""

    kind: type[Directive]
    keys: Mapping[str, str]  # the JSON key of each field
    codecs: Mapping[str, Codec]  # the JSON form of each field
    omit_defaults: tuple[str, ...]
    constants: JsonObject
    published: tuple[str, ...]
    translate: Callable[[JsonObject], JsonObject]

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(self.keys[field.name] for field in fields(self.kind) if is_required(field))

    @property
    def allowed(self) -> tuple[str, ...]:
        return (*self.keys.values(), *self.constants, *self.published)


DIRECTIVES: dict[str, Entry] = {}  # by op, which is the name of the class in lower case


def directive(
    *,
    keys: Mapping[str, str] | None = None,
    omit_defaults: tuple[str, ...] = (),
    constants: JsonObject | None = None,
    published: tuple[str, ...] = (),
    translate: Callable[[JsonObject], JsonObject] = unchanged,
    example: str = "",
) -> Callable[[type[D]], type[D]]:
    """Add a class to the list of directives. Its fields are its JSON, unless an argument differs.

    `keys`: fields that have another name in JSON. `omit_defaults`: fields that JSON and repr leave
    out while they have their default. `constants`: keys that always have the same value.
    `published`: further keys of the published system, which `translate` replaces by ours.
    `example`: a call, for messages about missing arguments.
    """

    def register(kind: type[D]) -> type[D]:
        types = get_type_hints(kind)
        names = [field.name for field in fields(kind)]
        DIRECTIVES[op_of(kind)] = Entry(
            kind=kind,
            keys={name: (keys or {}).get(name, name) for name in names},
            codecs={name: codec_of(types[name]) for name in names},
            omit_defaults=omit_defaults,
            constants=constants or {},
            published=published,
            translate=translate,
        )
        setattr(kind, "__repr__", lambda self: written(self, omit_defaults))  # noqa: B010
        setattr(kind, "__init__", saying_what_to_write(kind, example))  # noqa: B010
        return kind

    return register


def saying_what_to_write(kind: type[Directive], example: str) -> Callable[..., None]:
    """The `__init__` of a directive. Wrong arguments are an error that says what to write."""
    plain, call = kind.__init__, signature(kind)
    filters = "filter" in call.parameters

    @wraps(plain)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        try:
            plain(self, *args, **given)
        except TypeError:
            tags = filters and without_where(kind.__name__, list(call.parameters), args, given)
            problem = tags or wrong_call(kind.__name__, call, args, given, example)
            if problem is None:
                raise
            raise Refused(problem) from None
        if filters and not isinstance(self.filter, Filter):
            what = f"{kind.__name__}: {self.filter!r} is not a filter"
            raise Refused(Problem(what, "write where(PP=0), or where() for every region"))

    return checked


def without_where(
    name: str, known: Sequence[str], args: Sequence[object], given: Mapping[str, object]
) -> Problem | None:
    """Tags that belong into a filter.

    >>> without_where("Place", ["filter", "devices"], (), {"PP": 0, "devices": [0]}).fix
    'write Place(where(PP=0), devices=[0])'
    """
    tags = {one: value for one, value in given.items() if one not in known}
    alike = any(meant_by(one, known) or nearest(one, known) for one in tags)
    if not tags or alike or "filter" in given or any(isinstance(one, Filter) for one in args):
        return None
    wanted = ", ".join(f"{one}={value!r}" for one, value in tags.items())
    others = [*map(repr, args), *(f"{k}={value!r}" for k, value in given.items() if k in known)]
    what = f"{name} takes tags in a filter, as its first argument"
    return Problem(what, f"write {name}({', '.join([f'where({wanted})', *others])})")


def op_of(kind: type) -> str:
    return kind.__name__.lower()


def is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def entry_of(directive: Directive) -> Entry | None:
    """The entry of a directive, which may be of a subclass."""
    entries = ((kind, DIRECTIVES.get(op_of(kind))) for kind in type(directive).__mro__)
    return next((entry for kind, entry in entries if entry and entry.kind is kind), None)


def field_values(directive: Directive, omit_defaults: tuple[str, ...]) -> dict[str, Any]:
    """The values of the fields, except defaults that are left out."""
    values = {field: getattr(directive, field.name) for field in fields(directive)}
    return {
        field.name: value
        for field, value in values.items()
        if field.name not in omit_defaults or value != field.default
    }


def written(directive: Directive, omit_defaults: tuple[str, ...]) -> str:
    """A directive as a user writes it."""
    values = field_values(directive, omit_defaults).items()
    arguments = ", ".join(f"{name}={value!r}" for name, value in values)
    return f"{type(directive).__name__}({arguments})"


def known_directives() -> str:
    """`Order, Place, ... or Stream`, for messages."""
    *others, last = sorted(entry.kind.__name__ for entry in DIRECTIVES.values())
    return f"{', '.join(others)} or {last}"
