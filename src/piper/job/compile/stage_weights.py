"""What the stages of a compiled strategy weigh, for a table and a line in the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper.costs import Costs
from piper.directives import Directive, Place, Stage
from piper.directives.stage import flops_of, kept_bytes
from piper.ir.model import Model, Region
from piper.job.compile.compiler import Compiled
from piper.names import RegionId
from piper.strategies.cut_clock import homes_of_stages, kinds_of
from piper.strategies.cuts import seconds_of
from piper.view.reports.stage_table import TAGGED, StageWeight, line, table


def stage_table(compiled: Compiled) -> str:
    """A table for each `Stage` of the strategy, with several stages, and what its figures are.

    Stages that a strategy places without a `Stage` are those of the model's tags.
    """
    cuts = weights(compiled) or [(one.name, weights_of(compiled, one)) for one in tagged(compiled)]
    found = [table(name, rows) for name, rows in cuts if len(rows) > 1]
    activations = "activations: what one microbatch keeps for its backward"
    return "\n".join([*found, f"time: by {compiled.costs.words}; {activations}"] if found else ())


def tagged(compiled: Compiled) -> list[Stage]:
    """The tag that every region has and every `Place` names, as if a `Stage` had set it."""
    regions = [dict(region.tags) for region in compiled.dag.model.regions]
    placed = [set(one.filter.keys) for one in compiled.program if isinstance(one, Place)]
    names = [name for name in regions[0] if all(name in tags for tags in [*regions, *placed])]
    return [Stage(name, 1 + max(tags[name] for tags in regions)) for name in names[:1]]


def stage_lines(compiled: Compiled) -> list[str]:
    words = compiled.costs.words
    return [line(name, rows, words) for name, rows in weights(compiled) if len(rows) > 1]


def weights(compiled: Compiled) -> list[tuple[str, list[StageWeight]]]:
    cuts = {one.name: one for one in compiled.program if isinstance(one, Stage)}
    return [(name, weights_of(compiled, cut)) for name, cut in cuts.items()]


def weights_of(compiled: Compiled, cut: Stage) -> list[StageWeight]:
    model, name = compiled.dag.model, cut.name
    seconds = seconds_on_devices(model, compiled.costs, cut, compiled.program)
    stages: dict[int, list[Region]] = {}
    for region in model.regions:
        stages.setdefault(dict(region.tags)[name], []).append(region)
    flops = sum(map(flops_of, model.regions)) or 1.0
    time = sum(seconds.values()) or 1.0
    return [
        StageWeight(
            stage=stage,
            layers=layers_text(cut, stage, mine),
            parameters=parameters(model, mine),
            flops=sum(map(flops_of, mine)) / flops,
            time=sum(seconds[region.id] for region in mine) / time,
            kept=sum(kept_bytes(model, region) for region in mine),
        )
        for stage, mine in sorted(stages.items())
    ]


def seconds_on_devices(
    model: Model, costs: Costs, cut: Stage, program: Sequence[Directive]
) -> Mapping[RegionId, float]:
    """How long regions take for one microbatch, each on the slowest device of its stage."""
    if not costs.kinds:
        return seconds_of(model, costs)
    homes = homes_of_stages(program, cut)
    stage_of = {region.id: dict(region.tags)[cut.name] for region in model.regions}
    kinds = {stage: kinds_of(costs, homes.get(stage, (0,))) for stage in set(stage_of.values())}
    every = {id(one): seconds_of(model, one) for some in kinds.values() for one in some}
    return {
        region: max(every[id(one)][region] for one in kinds[stage])
        for region, stage in stage_of.items()
    }


def parameters(model: Model, regions: Sequence[Region]) -> int:
    buckets = dict.fromkeys(bucket for region in regions for bucket in region.buckets)
    return sum(spec.numel for bucket in buckets for spec in model.buckets[bucket].specs)


def layers_text(cut: Stage, stage: int, regions: Sequence[Region]) -> str:
    """The outermost tags under the stage, `L 0 to 4`. Without any, the user tagged the stage."""
    tags = [next((tag for tag in region.tags if tag[0] != cut.name), None) for region in regions]
    found = dict.fromkeys(tag for tag in tags if tag is not None)
    if None in tags or not found or len({key for key, _ in found}) > 1:
        many = 1 if isinstance(cut.stages, int) else cut.stages[stage]
        return TAGGED if many == 1 else f"{many} tagged regions"
    (key, first), (_, last) = min(found), max(found)
    return f"{key} {first}" if first == last else f"{key} {first} to {last}"
