"""What a strategy asks capture to divide: its `Shard` of weights and tokens, on the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from piper.directives import Directive, Place, Shard, apply
from piper.directives.remat import policies_of
from piper.errors import DirectiveError, Problem
from piper.ir.model import Model, Parameter
from piper.ir.placement.division import DivisionRequest, TeamAxis
from piper.ir.placement.placements import Cut, Placement
from piper.ir.placement.replicas import Replicas, replicas
from piper.ir.sharding import Division
from piper.ir.training import training_dag
from piper.names import RegionId

DIMENSIONS = {"colwise": 0, "rowwise": 1}  # of a matrix of [outputs, inputs]


def is_dense(directive: Directive) -> bool:
    """Whether it divides weights or tokens, over more than one device."""
    wanted = isinstance(directive, Shard) and directive.what != "experts"
    return wanted and directive.sharding.ways > 1  # type: ignore[attr-defined]


def feeds_of(strategy: Iterable[Directive]) -> Replicas:
    """Which replicas a strategy has, and which of them share a batch."""
    every = list(strategy)
    groups = (g for d in every if isinstance(d, Shard) and is_dense(d) for g in d.sharding.groups)
    return replicas((d.devices for d in every if isinstance(d, Place)), groups)


def division_requests(model: Model, program: Sequence[Directive]) -> tuple[DivisionRequest, ...]:
    """The regions of each `Shard` of weights or tokens, as they are where it stands.

    Those that are divided alike are one request, whatever devices they are on: strategies with
    different stages share what is captured. Experts on devices that divide the work of a batch take
    parts of its rows.
    """
    if not any(map(is_dense, program)):
        return ()
    found: dict[tuple[object, ...], DivisionRequest] = {}
    model = recomputed_as_they_are(model, program)
    last = max(number for number, one in enumerate(program) if isinstance(one, Shard))
    dag = apply(program, training_dag(model), upto=last + 1)
    for number, directive in enumerate(program):
        if is_dense(directive):
            new = request_of(model, program, number)
            key = new.ways, new.what, new.attention, repr(new.seeds)
            known = found.get(key, replace(new, regions=()))
            found[key] = replace(known, regions=(*known.regions, *new.regions))
    axes = axes_of(dag.divisions)
    dense = [replace(one, axis=axes.get(one.what, TeamAxis())) for one in found.values()]
    return with_experts(tuple(dag.shardings), dense)


def axes_of(divisions: Mapping[RegionId, Division]) -> dict[str, TeamAxis]:
    """Where tokens and weights lie in a team of devices, if any region is divided by both."""
    both = next((how for how in divisions.values() if len(how.axes) > 1), None)
    if both is None:
        return {}
    wanted = axes_in_team(both)
    for region, how in divisions.items():
        if len(how.axes) == 1 or axes_in_team(how) != wanted:
            what = f"{region} is divided in another way than regions that have two `Shard`s"
            fix = "divide all of them by tokens and by weights alike, or leave some whole"
            raise DirectiveError("shard", Problem(what, fix))
    return wanted


def axes_in_team(how: Division) -> dict[str, TeamAxis]:
    names = ("tokens", "weights")
    return {what: TeamAxis(k, how.ways, how.stride(k)) for k, what in enumerate(names)}


def recomputed_as_they_are(model: Model, program: Sequence[Directive]) -> Model:
    """What is recomputed does not change which regions are divided: nothing is lowered for it."""
    policies = policies_of(program)
    regions = (replace(r, recomputed=dict.fromkeys(policies, r)) for r in model.regions)
    return replace(model, regions=tuple(regions)) if policies else model


def with_experts(
    experts: tuple[RegionId, ...], dense: Sequence[DivisionRequest]
) -> tuple[DivisionRequest, ...]:
    """Regions that are sharded by experts are not divided otherwise."""
    if not experts:
        return tuple(dense)
    rest = (replace(d, regions=tuple(r for r in d.regions if r not in experts)) for d in dense)
    axes = {one.axis.number: one for one in dense}.values()  # all teams are of one size
    return (
        *rest,
        *(replace(one, regions=experts, what="experts", seeds={}, attention=None) for one in axes),
    )


def request_of(model: Model, program: Sequence[Directive], number: int) -> DivisionRequest:
    shard = program[number]
    assert isinstance(shard, Shard) and shard.what != "experts"
    before = apply(program, training_dag(model), upto=number)
    found = apply(program, training_dag(model), upto=number + 1)
    known = before.divisions
    regions = tuple(r for r, how in found.divisions.items() if known.get(r) != how)
    try:
        seeds = dict(seeds_of(model, regions, shard))
    except ValueError as error:
        name = f"shard (directive {number + 1} of {len(program)})"
        fix = "write names of parameters or modules of the model; * stands for any text"
        raise DirectiveError(name, Problem(str(error), fix)) from None
    ways = shard.sharding.ways
    how = {"what": shard.what, "seeds": seeds, "attention": shard.attention}
    return DivisionRequest(regions=regions, ways=ways, **how)  # type: ignore[arg-type]


def seeds_of(
    model: Model, regions: Iterable[RegionId], shard: Shard
) -> Iterator[tuple[str, Placement]]:
    """The parameters that the plan names, and how they are cut."""
    buckets = {bucket: None for region in regions for bucket in model.by_id[region].buckets}
    parameters = [p for bucket in buckets for p in model.buckets[bucket].parameters]
    for pattern, how in dict(shard.plan or ()).items():
        found = [p for p in parameters if is_named(p, pattern)]
        if not found:
            raise ValueError(f"the plan names {pattern}, and no parameter there is called so")
        for parameter in found:
            dim = DIMENSIONS[how]
            if dim < len(parameter.spec.shape):  # the bias of a row-wise layer stays whole
                yield parameter.name, Cut(dim)


def undivided_lines(found: Iterable[str]) -> Iterator[str]:
    """For the user: work that every device does whole."""
    return (f"not divided, every device computes all of it: {one}" for one in found)


def by_rows_lines(found: Iterable[str]) -> Iterator[str]:
    """For the user: what `cp` divides, if not tokens."""
    return (
        f"divided by rows, not by tokens, as that sends less: {one}; each device works on whole "
        "sequences of some rows there, and `piper show` lists what is sent before and behind; to "
        'divide tokens, write attention="ring" (cp_attention="ring" in a builder), or give each '
        "microbatch fewer rows than devices"
        for one in found
    )


def is_named(parameter: Parameter, pattern: str) -> bool:
    """Whether a pattern is that of a parameter, or of a module that it is in."""
    return any(fnmatchcase(parameter.name, one) for one in (pattern, f"{pattern}.*"))
