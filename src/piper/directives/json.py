"""Directives as JSON, in the form of the published system; unknown words are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from piper.directives.base import Directive
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.shard import Shard
from piper.directives.split import Split
from piper.directives.stream import Stream
from piper.errors import Problem, Refused, StrategyError
from piper.ir.filters import Filter, Wanted, where

ABSENT = "-"  # JSON for: not inside such a region
Row = Mapping[str, Any]


def encode(directive: Directive) -> dict[str, Any]:
    """
    >>> encode(Place(where(PP=0, EP=None), devices=[0]))
    {'op': 'place', 'filter': {'PP': 0, 'EP': '-'}, 'devices': [0], 'stream': 'pp'}
    """
    match directive:
        case Place():
            return {
                "op": "place", "filter": encode_filter(directive.filter),
                "devices": list(directive.devices), "stream": directive.stream,
            }  # fmt: skip
        case Replicate():
            names = [field.name for field in fields(directive) if field.name != "filter"]
            rest = {name: listed(getattr(directive, name)) for name in names}
            rest = {name: value for name, value in rest.items() if value is not None}
            return {"op": "replicate", "filter": encode_filter(directive.filter), **rest}
        case Shard():
            return {
                "op": "shard", "filter": encode_filter(directive.filter),
                "devices": listed(directive.devices), "stream": directive.stream,
            }  # fmt: skip
        case Split():
            return {
                "op": "split", "filter": {},
                "dim_name": directive.name, "num_microbatches": directive.n,
            }  # fmt: skip
        case Order():
            slots = [[encode_filter(wanted) for wanted in slot] for slot in directive.slots]
            more: dict[str, Any] = {} if directive.overlap else {"overlap": False}
            more |= {"ahead": directive.ahead} if directive.ahead else {}
            return {"op": "order", "filters": slots, **more}
        case Stream():
            return {
                "op": "stream", "name": directive.name,
                "sms": directive.sms, "priority": directive.priority,
            }  # fmt: skip
        case _:
            raise TypeError(f"{type(directive).__name__} has no JSON form")


def listed(value: Any) -> Any:
    """JSON has lists where directives have tuples."""
    return list(map(listed, value)) if isinstance(value, tuple) else value


def encode_filter(wanted: Filter) -> dict[str, int | str]:
    return {key: ABSENT if value is None else value for key, value in wanted.items}


def decode(row: object, place: str) -> Directive:
    """One directive; `place` says where it stands, for the error."""
    if not isinstance(row, dict) or "op" not in row:
        raise StrategyError(place, Problem("it has no op", f'write {{"op": one of {known()}}}'))
    if not isinstance(row["op"], str) or row["op"] not in READERS:
        raise StrategyError(place, Problem(f"unknown op {row['op']!r}", f"write one of {known()}"))
    reader, required, optional = READERS[row["op"]]
    try:
        check_keys(row, required, optional)
        return reader(row)
    except Refused as refused:
        raise StrategyError(f"{row['op']} ({place})", *refused.problems) from None


def known() -> str:
    return ", ".join(READERS)


def check_keys(row: Row, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    allowed = (*required, *optional)
    for key in row:
        if key != "op" and key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Refused(Problem(f"unknown key {key!r}", f"use {', '.join(allowed)}{hint}"))
    for key in required:
        if key not in row:
            raise Refused(Problem(f"the key {key!r} is missing", f'add "{key}": ...'))


def decode_filter(tags: object) -> Filter:
    if not isinstance(tags, dict):
        raise Refused(Problem(f"the filter {tags!r} is no object", 'write {"PP": 0}'))
    return where(**{key: decode_tag(value) for key, value in tags.items()})


def decode_tag(value: Any) -> Wanted:
    return None if value == ABSENT else value


def read_place(row: Row) -> Place:
    devices = row["devices"]
    if not isinstance(devices, list) or not all(type(device) is int for device in devices):
        raise Refused(Problem(f"devices {devices!r} is no list of numbers", "write [0] or [0, 2]"))
    return Place(decode_filter(row["filter"]), tuple(devices), row.get("stream", "pp"))


def read_replicate(row: Row) -> Replicate:
    """In our words, or in those of the published system."""
    given = {key: value for key, value in row.items() if key in NUMBERS}
    old = [key for key in PUBLISHED if key in row]
    for new in ("zero", "reduce"):
        if old and new in row:
            raise Refused(Problem(f"{new} and {old[0]} say the same thing", f"keep {new} only"))
    if row.get("shard_params") or row.get("shard_grads"):
        given["zero"] = 3 if row.get("shard_params") else 2
    if row.get("shard_params") and row.get("shard_grads") is False:
        given["reduce"] = "once"
    if row.get("bucket_size") is not None:
        given["bucket_mb"] = row["bucket_size"]
    if "prefetch_distance" in row:
        given["gather_ahead"] = row["prefetch_distance"]
    return Replicate(decode_filter(row["filter"]), row["devices"], **given)


def read_shard(row: Row) -> Shard:
    return Shard(decode_filter(row["filter"]), row["devices"], row.get("stream", "ep"))


def read_split(row: Row) -> Split:
    if row.get("filter"):
        raise Refused(Problem("split takes the whole batch", 'leave "filter" empty'))
    return Split(row["dim_name"], row["num_microbatches"])


def read_order(row: Row) -> Order:
    slots = row["filters"]
    if not isinstance(slots, list) or not all(isinstance(slot, list) for slot in slots):
        raise Refused(Problem("filters is no list of slots", 'write [[{"PP": 0}], [{"PP": 1}]]'))
    overlap, ahead = row.get("overlap", True), row.get("ahead", False)
    if not isinstance(overlap, bool):
        raise Refused(Problem(f"{overlap!r} is neither true nor false", "write true or false"))
    return Order(tuple(tuple(map(decode_filter, slot)) for slot in slots), overlap, ahead)


def read_stream(row: Row) -> Stream:
    return Stream(**{key: value for key, value in row.items() if key != "op"})


PUBLISHED = ("shard_grads", "shard_params")
NUMBERS = (
    "zero", "bucket_mb", "reduce_stream", "gather_stream", "gather_ahead", "gather_buffers",
    "reduce",
)  # fmt: skip
Reader = Callable[[Row], Directive]
READERS: dict[str, tuple[Reader, tuple[str, ...], tuple[str, ...]]] = {
    "place": (read_place, ("filter", "devices"), ("stream",)),
    "replicate": (
        read_replicate,
        ("filter", "devices"),
        (*NUMBERS, *PUBLISHED, "bucket_size", "prefetch_distance"),
    ),
    "shard": (read_shard, ("filter", "devices"), ("stream",)),
    "split": (read_split, ("dim_name", "num_microbatches"), ("filter",)),
    "order": (read_order, ("filters",), ("overlap", "ahead")),
    "stream": (read_stream, ("name",), ("sms", "priority")),
}
