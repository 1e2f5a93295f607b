"""How the fields of directives look in JSON: one codec for each type that a field may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from piper.directives.arguments import (
    DeviceGroups,
    DeviceList,
    ParameterPlan,
    Slots,
    StageSizes,
)
from piper.errors import Problem, Refused
from piper.ir.filters import Filter, Wanted, where

ABSENT = "-"  # JSON for None in a filter: not inside such a region


@dataclass(frozen=True, slots=True)
class Codec:
    """A field as JSON, and back. `read` checks only what the directive itself cannot check."""

    write: Callable[[Any], Any]
    read: Callable[[str, Any], Any]  # given the key, for the message


def as_is(_: str, value: Any) -> Any:
    return value


def write_filter(wanted: Filter) -> dict[str, int | str]:
    return {key: ABSENT if value is None else value for key, value in wanted.items}


def read_filter(key: str, value: object) -> Filter:
    if not isinstance(value, dict):
        raise Refused(Problem(f"the {key} {value!r} is not an object", 'write {"PP": 0}'))
    return where(**{tag: read_tag(wanted) for tag, wanted in value.items()})


def read_tag(value: Any) -> Wanted:
    return None if value == ABSENT else value


def write_slots(slots: tuple[tuple[Filter, ...], ...]) -> list[list[dict[str, int | str]]]:
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
