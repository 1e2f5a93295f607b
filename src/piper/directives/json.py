"""Directives as JSON, in the form of the published system; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from piper.directives.base import DIRECTIVES, Directive, Entry, Row, op_of, shown_fields
from piper.errors import Problem, Refused, StrategyError


def encode(directive: Directive) -> dict[str, Any]:
    """
    >>> from piper.directives.place import Place
    >>> from piper.ir.filters import where
    >>> encode(Place(where(PP=0, EP=None), devices=[0]))
    {'op': 'place', 'filter': {'PP': 0, 'EP': '-'}, 'devices': [0], 'stream': 'pp'}
    """
    op = op_of(type(directive))
    if op not in DIRECTIVES:
        raise TypeError(f"{type(directive).__name__} has no JSON form: it lacks @directive")
    entry = DIRECTIVES[op]
    values = {
        entry.keys[name]: entry.codecs[name].write(value)
        for name, value in shown_fields(directive).items()
    }
    return {"op": op, **entry.constants, **values}


def decode(row: object, place: str) -> Directive:
    """One directive; `place` says where it stands, for the error."""
    ops = ", ".join(sorted(DIRECTIVES))
    if not isinstance(row, dict) or "op" not in row:
        raise StrategyError(place, Problem("it has no op", f'write {{"op": one of {ops}}}'))
    op = row["op"]
    if not isinstance(op, str) or op not in DIRECTIVES:
        raise StrategyError(place, Problem(f"unknown op {op!r}", f"write one of {ops}"))
    try:
        return read(DIRECTIVES[op], {key: value for key, value in row.items() if key != "op"})
    except Refused as refused:
        raise StrategyError(f"{op} ({place})", *refused.problems) from None


def read(entry: Entry, row: Row) -> Directive:
    check_keys(row, entry)
    row = entry.translate(row)
    arguments = {
        name: entry.codecs[name].read(key, row[key])
        for name, key in entry.keys.items()
        if key in row
    }
    build: Callable[..., Directive] = entry.kind
    return build(**arguments)


def check_keys(row: Row, entry: Entry) -> None:
    for key, value in row.items():
        if key not in entry.allowed:
            near = get_close_matches(key, entry.allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Refused(Problem(f"unknown key {key!r}", f"use {', '.join(entry.allowed)}{hint}"))
        if entry.constants.get(key, value) != value:
            fix = f'write "{key}": {entry.constants[key]}, or leave it out'
            raise Refused(Problem(f"{key} {value!r} is not supported", fix))
    for key in entry.required:
        if key not in row:
            raise Refused(Problem(f"the key {key!r} is missing", f'add "{key}": ...'))
