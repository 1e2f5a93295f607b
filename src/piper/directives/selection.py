"""Which nodes a filter selects; filters that select none are errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.filters import Both, Either, Filter, Not
from piper.ir.nodes import Compute
from piper.names import BI, BW, PASS, amount

MOST = 6  # words in a list of what is missing
MICROBATCHES = "MB"
ADVICE = {  # for the usual names, which are like each other, and mean something else
    "PP": 'write Stage("PP", n) before this directive, or where() for the whole model; or put the '
    'stages into `with piper.annotate("PP"):`',
    MICROBATCHES: 'write Split("MB", n) before this directive',
    "EP": "leave out ep= or this directive if the model has no experts; or put the experts into "
    '`with piper.annotate("EP"):`, as piper.models.hugging_face.adapt_experts(model) does',
}


def selected(dag: Dag, wanted: Filter) -> list[Compute]:
    """The nodes that match a filter, at least one for every alternative in it."""
    nodes = dag.select(wanted)
    if not nodes:
        raise Refused(*why_nothing(dag, wanted))
    if type(wanted) is not Filter or has_lists(wanted):
        require_alternatives(dag, wanted)
    return nodes


def has_lists(wanted: Filter) -> bool:
    return not {type(value) for _, value in wanted.items}.isdisjoint((tuple, range))


def require_alternatives(dag: Dag, wanted: Filter) -> None:
    """One of several that exists nowhere is a slip, also where the others match something."""
    match wanted:
        case Either():
            for part in wanted.parts:
                selected(dag, part)
        case Both():
            for part in wanted.parts:
                require_alternatives(dag, part)
        case Not():
            pass  # `~where(EP="*")` is for models without EP, too
        case Filter():
            problems = tuple(missing_indices(dag, wanted))
            if problems:
                raise Refused(*problems)


def missing_indices(dag: Dag, wanted: Filter) -> Iterator[Problem]:
    for key, value in wanted.items:
        if isinstance(value, tuple | range):
            exist = {found for (found,) in dag.index((key,))}
            missing = [str(one) for one in value if one not in exist]
            if missing:
                what = f"{wanted}: there is no {key}={listed(missing)}"
                hint = half_hint(wanted) if key == PASS else ""
                fix = f"choose from what exists: {key}: {values_of(dag, key)}{hint}"
                yield Problem(what, fix)


def half_hint(wanted: Filter) -> str:
    """Which filters split a backward into halves."""
    passes = dict(wanted.items)[PASS]
    if not {BI, BW} & set(passes if isinstance(passes, tuple) else (passes,)):
        return ""
    return '; BI and BW exist where an `Order` has where(..., PASS="BI") as a filter of its own'


def listed(words: Sequence[str]) -> str:
    return ", ".join(words if len(words) <= MOST else [*words[: MOST - 1], "..."])


def why_nothing(dag: Dag, wanted: Filter) -> tuple[Problem, ...]:
    """Why a filter matches nothing, down to the part of it that is at fault."""
    match wanted:
        case Either():
            return tuple(problem for part in wanted.parts for problem in why_nothing(dag, part))
        case Both():
            empty = [part for part in wanted.parts if not dag.select(part)]
            found = tuple(problem for part in empty for problem in why_nothing(dag, part))
            return found or (nothing_in_common(dag, wanted),)
        case Not():
            fix = f"{wanted.part} matches everything: write one that leaves something"
            return (Problem(f"{wanted} matches nothing", fix),)
        case Filter():
            unknown = [key for key in wanted.keys if key not in dag.tag_names]
            return (unknown_key(dag, unknown[0]) if unknown else no_match(dag, wanted),)


def nothing_in_common(dag: Dag, wanted: Both) -> Problem:
    counts = [(part, {node.region for node in dag.select(part)}) for part in wanted.parts]
    each = ", ".join(f"{part} matches {amount(len(found), 'region')}" for part, found in counts)
    return Problem(f"{wanted} matches nothing", f"{each}, but none is in all: change one of them")


def unknown_key(dag: Dag, key: str) -> Problem:
    missing = f"no region has the tag {key}"
    if key in ADVICE and not (key == MICROBATCHES and dag.dimensions):
        return Problem(missing, ADVICE[key])
    if tuple(dag.tag_names) == (PASS,):
        fix = (
            "write where() for the whole model; or "
            f'`with piper.annotate("{key}"):` around parts of its forward; or '
            "piper.tag_layers(model, x), which names its layers L=0, L=1 and so on"
        )
        return Problem(f"{missing}: the model has no annotations", fix)
    near = get_close_matches(key, set(dag.tag_names) - {PASS}, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]}?" if near else ""
    if not dag.dimensions:
        hint += " (the key of a `Split` or a `Stage` exists only after that directive)"
    return Problem(missing, f"use one of {', '.join(dag.tag_names)}{hint}")


def no_match(dag: Dag, wanted: Filter) -> Problem:
    tags = Filter(tuple(item for item in wanted.items if item[0] != PASS))
    passes = dict.fromkeys(str(node.phase) for node in dag.select(tags))
    if PASS in wanted.keys and passes:
        hint = half_hint(wanted)
        fix = f"{tags} has the passes {', '.join(passes)}: use one of these{hint}"
        return Problem(f"{wanted} matches nothing", fix)
    near = next(near_matches(dag, wanted), None)
    if near is not None:
        return Problem(f"{wanted} matches nothing", near)
    existing = "; ".join(f"{key}: {values_of(dag, key)}" for key in wanted.keys)
    return Problem(f"{wanted} matches nothing", f"choose from what exists: {existing or 'nothing'}")


def near_matches(dag: Dag, wanted: Filter) -> Iterator[str]:
    """What there is if one tag of several may be another."""
    for key in wanted.keys if len(wanted.keys) > 1 else ():
        others = Filter(tuple(item for item in wanted.items if item[0] != key))
        found = dict.fromkeys(dag.tags_of(node).get(key) for node in dag.select(others))
        indices = [value for value in found if isinstance(value, int)]
        if indices:
            yield f"{others} has {key} {span(indices)}: use one of these"
        elif found:
            yield f"{others} has no {key}: leave it out"


def values_of(dag: Dag, key: str) -> str:
    """The values of one key, short: `0 to 3`, or a list."""
    values = [value for (value,) in dag.index((key,)) if value is not None]
    if key == PASS or not values:
        return ", ".join(map(str, values)) or "none"
    return span([value for value in values if isinstance(value, int)])


def span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    contiguous = len(values) == high - low + 1 and len(values) > 2
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
