"""Stage: layers into pipeline stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper.directives.arguments import StageSizes
from piper.directives.base import Directive, directive
from piper.errors import Problem, Refused
from piper.ir.balance import balanced
from piper.ir.dag import Dag
from piper.ir.model import Region
from piper.ir.nodes import Compute, Node, Tags
from piper.names import PASS, B, F, RegionId, amount

Layer = list[Region]


@directive()
@dataclass(frozen=True, slots=True)
class Stage(Directive):
    """Group layers into stages, under a tag that the directives after it can name.

    A layer is all regions with the same outermost tag. Regions without a tag join the layer before
    them, or the first one. `stages` is a number of stages, cut so that the heaviest has the fewest
    FLOPs possible, or how many layers each stage has. A model that has the tag already keeps it
    where it has as many layers as stages; where it has more, these are grouped.

    rewrite:
        F{L=0} -> F{L=1} -> F{L=2} -> F             Stage("PP", [1, 2])
        -->
        F{PP=0, L=0} -> F{PP=1, L=1} -> F{PP=1, L=2} -> F{PP=1}
    """

    name: str
    stages: StageSizes

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name == PASS:
            raise Refused(Problem(f"{self.name!r} cannot be a tag", 'write Stage("PP", 4)'))
        sizes = self.stages if isinstance(self.stages, list | tuple) else (self.stages,)
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            what = f"{self.stages!r} is neither a number of stages nor a list of their layers"
            raise Refused(Problem(what, 'write Stage("PP", 4) or Stage("PP", [5, 6, 6, 5])'))
        if not isinstance(self.stages, int):
            object.__setattr__(self, "stages", tuple(self.stages))

    def rewrite(self, dag: Dag) -> Dag:
        if self.name in dict(dag.dimensions):
            fix = 'choose another tag, such as "PP"'
            raise Refused(Problem(f"{self.name} counts microbatches", fix))
        layers = layers_of(dag.model.regions, self.name)
        stage_of: dict[RegionId, int] = {}
        first = 0
        for stage, size in enumerate(self.sizes(layers)):
            for layer in layers[first : first + size]:
                stage_of.update((region.id, stage) for region in layer)
            first += size
        return retagged(dag, self.name, stage_of)

    def sizes(self, layers: Sequence[Layer]) -> tuple[int, ...]:
        """How many layers each stage gets."""
        if not isinstance(self.stages, int):
            require_all_layers(self.stages, len(layers))
            return tuple(self.stages)
        if len(layers) < self.stages:
            raise Refused(too_few_layers(len(layers), self.stages))
        weights = [sum(map(flops_of, layer)) for layer in layers]
        return balanced(weights if any(weights) else [1.0] * len(layers), self.stages)


def layers_of(regions: Sequence[Region], name: str) -> list[Layer]:
    """In program order, or by number where regions have this tag already."""
    has_tag = any(name in dict(region.tags) for region in regions)
    layers: dict[object, Layer] = {}
    key: object = None
    before: Layer = []  # regions without a tag in front of the first layer
    for region in regions:
        own = dict(region.tags).get(name) if has_tag else next(iter(region.tags), None)
        key = key if own is None else own
        if key is None:
            before.append(region)
        else:
            layers.setdefault(key, []).append(region)
    found = [layers[k] for k in sorted(layers)] if has_tag else list(layers.values())  # type: ignore[type-var]
    return [[*before, *found[0]], *found[1:]] if found else [before]


def flops_of(region: Region) -> float:
    return region.flops.get(F, 0.0) + region.flops.get(B, 0.0)


def retagged(dag: Dag, name: str, stage_of: dict[RegionId, int]) -> Dag:
    """The same DAG, its regions and their nodes under one more tag."""
    regions, seen = [], Counter[Tags]()
    for region in dag.model.regions:
        tags = with_tag(region.tags, name, stage_of[region.id])
        regions.append(under(region, tags, seen[tags]))
        seen[tags] += 1

    def moved(node: Node) -> Node:
        if not isinstance(node, Compute):
            return node
        return replace(node, tags=with_tag(node.tags, name, stage_of[node.region]))

    nodes = {key: moved(node) for key, node in dag.nodes.items()}
    return replace(dag, model=replace(dag.model, regions=tuple(regions)), nodes=nodes)


def under(region: Region, tags: Tags, run: int) -> Region:
    """A region with other tags, and so the descriptions of it that recompute."""
    others = {keep: replace(one, tags=tags, run=run) for keep, one in region.recomputed.items()}
    return replace(region, tags=tags, run=run, recomputed=others)


def with_tag(tags: Tags, name: str, stage: int) -> Tags:
    """In the place of the same tag, or else in front of all others.

    >>> with_tag((("L", 3),), "PP", 1)
    (('PP', 1), ('L', 3))
    """
    if name not in dict(tags):
        return ((name, stage), *tags)
    return tuple((key, stage if key == name else index) for key, index in tags)


def require_all_layers(sizes: Sequence[int], layers: int) -> None:
    if sum(sizes) != layers:
        found = f"the stages {list(sizes)} have {amount(sum(sizes), 'layer')}"
        what = f"{found}, but the model has {layers}"
        raise Refused(Problem(what, f"write sizes that add up to {layers}"))


def too_few_layers(layers: int, stages: int) -> Problem:
    return Problem(
        f"the model has {amount(layers, 'layer')}, too few for {stages} stages",
        'annotate more layers, `with piper.annotate("L"):` around each, or tag them by module path '
        f'with piper.tag(model, "L", [...]); or use at most {amount(layers, "stage")}',
    )
