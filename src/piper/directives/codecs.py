"""How the fields of directives look in JSON: one codec for each type that a field may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from piper.directives.arguments import (
    DeviceGroups,
    DeviceList,
    Kept,
    Live,
    ParameterPlan,
    Slots,
    Speeds,
    StageSizes,
)
from piper.errors import Problem, Refused
from piper.ir.filters import Both, Either, Filter, Not, Wanted, both, either, where

ABSENT = "-"  # JSON for None in a filter: not inside such a region
OR, AND, NOT = "|", "&", "~"  # no tag can have these names


@dataclass(frozen=True, slots=True)
class Codec:
    """A field as JSON, and back. `read` checks only what the directive itself cannot check."""

    write: Callable[[Any], Any]
    read: Callable[[str, Any], Any]  # given the key, for the message


def as_is(_: str, value: Any) -> Any:
    return value


def write_filter(wanted: Filter) -> dict[str, Any]:
    """
    >>> write_filter(where(L=range(3), EP=None) | ~where(L=7))
    {'|': [{'L': [0, 1, 2], 'EP': '-'}, {'~': {'L': 7}}]}
    """
    match wanted:
        case Either():
            return {OR: [write_filter(part) for part in wanted.parts]}
        case Both():
            return {AND: [write_filter(part) for part in wanted.parts]}
        case Not():
            return {NOT: write_filter(wanted.part)}
        case Filter():
            return {key: write_tag(value) for key, value in wanted.items}


def read_filter(key: str, value: object) -> Filter:
    if not isinstance(value, dict):
        raise Refused(Problem(f"the {key} {value!r} is not an object", 'write {"PP": 0}'))
    signs = [sign for sign in (OR, AND, NOT) if sign in value]
    if not signs:
        return where(**{tag: read_tag(wanted) for tag, wanted in value.items()})
    if len(value) > 1:
        fix = f'write {{"{signs[0]}": ...}} alone, and tags in objects inside it'
        raise Refused(Problem(f"{signs[0]!r} stands beside other keys in the {key}", fix))
    return read_combined(signs[0], value[signs[0]])


def read_combined(sign: str, value: object) -> Filter:
    if sign == NOT:
        return ~read_filter(NOT, value)
    if not isinstance(value, list) or len(value) < 2:
        fix = f'write {{"{sign}": [{{"PP": 0}}, {{"PP": 1}}]}}'
        raise Refused(Problem(f"{sign!r} is not followed by two or more filters", fix))
    join = either if sign == OR else both
    return join(*(read_filter(sign, part) for part in value))


def write_tag(value: Wanted) -> Any:
    if isinstance(value, tuple | range):
        return list(value)
    return ABSENT if value is None else value


def read_tag(value: Any) -> Wanted:
    return None if value == ABSENT else value


def write_slots(slots: tuple[tuple[Filter, ...], ...]) -> list[list[dict[str, Any]]]:
    return [[write_filter(wanted) for wanted in slot] for slot in slots]


def read_slots(key: str, value: object) -> tuple[tuple[Filter, ...], ...]:
    if not isinstance(value, list) or not all(isinstance(slot, list) for slot in value):
        fix = 'write [[{"PP": 0}], [{"PP": 1}]]'
        raise Refused(Problem(f"{key} is not a list of slots", fix))
    return tuple(tuple(read_filter("filter", wanted) for wanted in slot) for slot in value)


def write_devices(devices: Any) -> Any:
    """JSON has lists where directives have tuples."""
    return list(map(write_devices, devices)) if isinstance(devices, tuple) else devices


SCALARS = (str, int, float, bool, NoneType)
SCALAR = Codec(lambda value: value, as_is)
DEVICES = Codec(write_devices, as_is)
CODECS: dict[object, Codec] = {
    Filter: Codec(write_filter, read_filter),
    Slots: Codec(write_slots, read_slots),
    DeviceList: DEVICES,
    DeviceGroups: DEVICES,
    StageSizes: DEVICES,
    ParameterPlan: Codec(lambda plan: None if plan is None else dict(plan), as_is),
    Live: DEVICES,
    Speeds: DEVICES,
    Kept: DEVICES,
}


def codec_of(kind: object) -> Codec:
    """The codec of a field's type.

    >>> codec_of(int | None) is SCALAR
    True
    """
    if kind in CODECS:
        return CODECS[kind]
    if all(part in SCALARS for part in scalar_types(kind)):
        return SCALAR
    raise TypeError(f"a field of type {kind} has no JSON form: add a codec for it")


def scalar_types(kind: object) -> list[object]:
    """The types of which a union or a literal consists."""
    if get_origin(kind) is Literal:
        return [type(value) for value in get_args(kind)]
    if get_origin(kind) in (Union, UnionType):
        return [part for member in get_args(kind) for part in scalar_types(member)]
    return [kind]
