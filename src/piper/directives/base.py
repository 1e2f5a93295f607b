"""What directives share: looking up filters, and refusing those that match nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Protocol

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.devices import Devices
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.names import PASS, Device


class Directive(Protocol):
    """What a user writes; a pure rewrite of the DAG."""

    def rewrite(self, dag: Dag) -> Dag: ...


def device_list(devices: Iterable[int]) -> tuple[Device, ...]:
    """A checked list of devices: not empty, no device twice."""
    found = Devices(devices if isinstance(devices, list | tuple | range) else ())
    fine = all(type(device) is int and device >= 0 for device in found)
    if not found or not fine or len(set(found)) < len(found):
        shown = list(devices) if isinstance(devices, tuple) else devices
        raise Refused(
            Problem(f"devices {shown!r} is no list of devices", "name each device once: [0, 2]")
        )
    return found


def chosen(dag: Dag, wanted: Filter) -> list[Compute]:
    """The nodes a filter means; refuses a filter that means none."""
    nodes = dag.select(wanted)
    if nodes:
        return nodes
    unknown = [key for key in wanted.keys if key not in dag.tag_names]
    raise Refused(unknown_key(dag, unknown[0]) if unknown else no_match(dag, wanted))


def unknown_key(dag: Dag, key: str) -> Problem:
    if tuple(dag.tag_names) == (PASS,):
        fix = f'write `with piper.annotate("{key}"):` around the parts of its forward'
        return Problem(f"no region has the tag {key}, for the model has no annotations", fix)
    near = get_close_matches(key, dag.tag_names, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]}?" if near else ""
    if not dag.dimensions:
        hint += " (a key that `Split` makes exists only after the `Split`)"
    return Problem(f"no region has the tag {key}", f"use one of {', '.join(dag.tag_names)}{hint}")


def no_match(dag: Dag, wanted: Filter) -> Problem:
    tags = Filter(tuple(item for item in wanted.items if item[0] != PASS))
    passes = dict.fromkeys(str(node.phase) for node in dag.select(tags))
    if "PASS" in wanted.keys and passes:
        has = f"{tags} has the passes {', '.join(passes)}"
        return Problem(f"{wanted} matches nothing", f"{has}: name one of these")
    exists = "; ".join(f"{key}: {found(dag, key)}" for key in wanted.keys)
    return Problem(f"{wanted} matches nothing", f"what exists: {exists or 'no regions'}")


def found(dag: Dag, key: str) -> str:
    """The values of one key, short: `0 to 3`, or a list."""
    values = [value for (value,) in dag.index((key,)) if value is not None]
    if key == PASS or len(values) < 3:
        return ", ".join(map(str, values)) or "none"
    return span([value for value in values if isinstance(value, int)])


def span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    whole = len(values) == high - low + 1
    return f"{low} to {high}" if whole else ", ".join(map(str, sorted(values)))
