"""Directives as JSON, in the form of the published system; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from piper.directives.base import (
    DIRECTIVES,
    Directive,
    Entry,
    JsonObject,
    entry_of,
    field_values,
    op_of,
)
from piper.errors import Problem, Refused, StrategyError


def encode(directive: Directive) -> dict[str, Any]:
    """
    >>> from piper.directives.place import Place
    >>> from piper.ir.filters import where
    >>> encode(Place(where(PP=0, EP=None), devices=[0]))
    {'op': 'place', 'filter': {'PP': 0, 'EP': '-'}, 'devices': [0], 'stream': 'pp'}
    """
    entry = entry_of(directive)
    if entry is None:
        raise TypeError(f"{type(directive).__name__} has no JSON form: it lacks @directive")
    values = {
        entry.keys[name]: entry.codecs[name].write(value)
        for name, value in field_values(directive, entry.omit_defaults).items()
    }
    return {"op": op_of(entry.kind), **entry.constants, **values}


def decode(given: object, place: str) -> Directive:
    """One directive; `place` says where it stands, for the error."""
    ops = ", ".join(sorted(DIRECTIVES))
    if not isinstance(given, dict) or "op" not in given:
        raise StrategyError.of(place, "it has no op", f'write {{"op": one of {ops}}}')
    op = given["op"]
    if not isinstance(op, str) or op not in DIRECTIVES:
        raise StrategyError.of(place, f"unknown op {op!r}", f"write one of {ops}")
    try:
        return read(DIRECTIVES[op], {key: value for key, value in given.items() if key != "op"})
    except Refused as refused:
        raise StrategyError(f"{op} ({place})", *refused.problems) from None


def read(entry: Entry, given: JsonObject) -> Directive:
    check_keys(given, entry)
    given = entry.translate(given)
    arguments = {
        name: entry.codecs[name].read(key, given[key])
        for name, key in entry.keys.items()
        if key in given
    }
    build: Callable[..., Directive] = entry.kind
    return build(**arguments)


def check_keys(given: JsonObject, entry: Entry) -> None:
    for key, value in given.items():
        if key not in entry.allowed:
            near = get_close_matches(key, entry.allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Refused(Problem(f"unknown key {key!r}", f"use {', '.join(entry.allowed)}{hint}"))
        if key in entry.constants and entry.constants[key] != value:
            fix = f'write "{key}": {entry.constants[key]}, or leave it out'
            raise Refused(Problem(f"{key} {value!r} is not supported", fix))
    for key in entry.required:
        if key not in given:
            raise Refused(Problem(f"the key {key!r} is missing", f'add "{key}": ...'))
