"""Which nodes a filter selects; filters that select none are errors."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.nodes import Compute
from piper.names import PASS


def selected(dag: Dag, wanted: Filter) -> list[Compute]:
    """The nodes that match a filter, at least one."""
    nodes = dag.select(wanted)
    if nodes:
        return nodes
    unknown = [key for key in wanted.keys if key not in dag.tag_names]
    raise Refused(unknown_key(dag, unknown[0]) if unknown else no_match(dag, wanted))


def unknown_key(dag: Dag, key: str) -> Problem:
    if tuple(dag.tag_names) == (PASS,):
        fix = f'write `with piper.annotate("{key}"):` around parts of its forward'
        return Problem(f"no region has the tag {key}: the model has no annotations", fix)
    near = get_close_matches(key, dag.tag_names, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]}?" if near else ""
    if not dag.dimensions:
        hint += " (the key of a `Split` exists only after that `Split`)"
    return Problem(f"no region has the tag {key}", f"use one of {', '.join(dag.tag_names)}{hint}")


def no_match(dag: Dag, wanted: Filter) -> Problem:
    tags = Filter(tuple(item for item in wanted.items if item[0] != PASS))
    passes = dict.fromkeys(str(node.phase) for node in dag.select(tags))
    if PASS in wanted.keys and passes:
        fix = f"{tags} has the passes {', '.join(passes)}: use one of these"
        return Problem(f"{wanted} matches nothing", fix)
    existing = "; ".join(f"{key}: {values_of(dag, key)}" for key in wanted.keys)
    return Problem(f"{wanted} matches nothing", f"choose from what exists: {existing or 'nothing'}")


def values_of(dag: Dag, key: str) -> str:
    """The values of one key, short: `0 to 3`, or a list."""
    values = [value for (value,) in dag.index((key,)) if value is not None]
    if key == PASS or len(values) < 3:
        return ", ".join(map(str, values)) or "none"
    return span([value for value in values if isinstance(value, int)])


def span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    contiguous = len(values) == high - low + 1
    return f"{low} to {high}" if contiguous else ", ".join(map(str, sorted(values)))


def require_whole_regions(dag: Dag, wanted: Filter, why: str) -> None:
    """Some directives are about all passes and microbatches of a region: no filter may pick some.

    `why` is a subject and a verb: "parameters serve".
    """
    parts = (PASS, *(name for name, _ in dag.dimensions))
    named = [key for key in wanted.keys if key in parts]
    if named:
        what = f"{wanted} selects some of a region's work, but {why} all of it"
        raise Refused(Problem(what, f"leave {named[0]} out of the filter"))
