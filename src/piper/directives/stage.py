"""Stage: layers into pipeline stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper.directives.arguments import MOST_PARTS, Live, Speeds, StageSizes
from piper.directives.base import Directive, directive
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.model import Model, Region
from piper.ir.nodes import Compute, Node, Tags
from piper.ir.partition.balance import Memory, balanced, smallest_limit
from piper.ir.partition.balance_by_speed import balanced_by_speed
from piper.ir.values import Role
from piper.names import PASS, B, F, RegionId, amount

Layer = list[Region]
SHOWN = 16  # stages in the example of a message
ADAM = 4.0  # parameters, gradients, and two moments of each


@directive(omit_defaults=("live", "memory_gib", "state", "speeds"), example='Stage("PP", 2)')
@dataclass(frozen=True, slots=True)
class Stage(Directive):
    """Group layers into stages, under a tag that the directives after it can name.

    A layer is all regions with the same outermost tag. Regions without a tag join the layer before
    them, or the first one. `stages` is how many layers each stage has, or a number of stages: the
    compiler then cuts so that the slowest stage takes as little time as possible, or, where a
    program has the orders of a pipeline, so that its simulated step does. A model that has the tag
    already keeps it where it has as many layers as stages; where it has more, these are grouped.

    With `memory_gib`, no stage holds more GiB than that: activations of the microbatches that
    are `live` in it (one number for each stage), and `state` times its parameters, for gradients
    and optimizer too. With `speeds`, a stage that is twice as fast as another gets twice as much
    work.

    rewrite:
        F{L=0} -> F{L=1} -> F{L=2} -> F             Stage("PP", [1, 2])
        -->
        F{PP=0, L=0} -> F{PP=1, L=1} -> F{PP=1, L=2} -> F{PP=1}
    """

    name: str
    stages: StageSizes
    live: Live = None
    memory_gib: float | None = None
    state: float = ADAM
    speeds: Speeds = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name == PASS:
            raise Refused(Problem(f"{self.name!r} cannot be a tag", 'write Stage("PP", 4)'))
        sizes = self.stages if isinstance(self.stages, list | tuple) else (self.stages,)
        if not sizes or any(type(n) is not int or not 1 <= n <= MOST_PARTS for n in sizes):
            what = f"{self.stages!r} is neither a number of stages nor a list of their layers"
            raise Refused(Problem(what, 'write Stage("PP", 4) or Stage("PP", [5, 6, 6, 5])'))
        if not isinstance(self.stages, int):
            object.__setattr__(self, "stages", tuple(self.stages))
        if self.live is not None:
            object.__setattr__(self, "live", live_counts(self.live, self.count))
        require_size("memory_gib", 1.0 if self.memory_gib is None else self.memory_gib)
        require_size("state", self.state)
        if self.speeds is not None:
            object.__setattr__(self, "speeds", stage_speeds(self.speeds, self.count))

    @property
    def count(self) -> int:
        """The number of stages."""
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    def rewrite(self, dag: Dag) -> Dag:
        if self.name in dict(dag.dimensions):
            fix = 'choose another tag, such as "PP"'
            raise Refused(Problem(f"{self.name} counts microbatches", fix))
        stage_of = self.stage_of(dag.model)

        def moved(node: Node) -> Node:
            if not isinstance(node, Compute):
                return node
            return replace(node, tags=with_tag(node.tags, self.name, stage_of[node.region]))

        nodes = {key: moved(node) for key, node in dag.nodes.items()}
        return replace(dag, model=retagged(dag.model, self.name, stage_of), nodes=nodes)

    def cut(self, model: Model, seconds: Mapping[RegionId, float]) -> tuple[Stage, Model]:
        """The same with the number of layers of each stage, and the model under it.

        `seconds` is how long regions take; without a figure for any, their FLOPs count.
        """
        sizes = self.sizes(model, layers_of(model.regions, self.name), seconds)
        found = replace(self, stages=sizes)
        return found, retagged(model, self.name, found.stage_of(model))

    def stage_of(self, model: Model) -> dict[RegionId, int]:
        layers = layers_of(model.regions, self.name)
        found: dict[RegionId, int] = {}
        first = 0
        for stage, size in enumerate(self.sizes(model, layers, {})):
            for layer in layers[first : first + size]:
                found.update((region.id, stage) for region in layer)
            first += size
        return found

    def sizes(
        self, model: Model, layers: Sequence[Layer], seconds: Mapping[RegionId, float]
    ) -> tuple[int, ...]:
        """How many layers each stage gets."""
        if not isinstance(self.stages, int):
            require_all_layers(self.stages, len(layers))
            return tuple(self.stages)
        if len(layers) < self.stages:
            raise Refused(too_few_layers(len(layers), self.stages))
        weights = [sum(seconds.get(r.id, flops_of(r)) for r in layer) for layer in layers]
        weights = weights if any(weights) else [1.0] * len(layers)
        memory = self.memory(model, layers)
        if self.speeds is None:
            found = balanced(weights, self.stages, memory)
        else:
            found = balanced_by_speed(weights, self.speeds, memory)
        if found is None:
            assert memory is not None
            raise Refused(too_little_memory(memory, self.stages))
        return found

    def memory(self, model: Model, layers: Sequence[Layer]) -> Memory | None:
        if self.memory_gib is None:
            return None
        return Memory(
            state=[self.state * parameter_bytes(model, layer) for layer in layers],
            kept=[sum(kept_bytes(model, region) for region in layer) for layer in layers],
            live=self.live or (1,) * self.count,
            limit=self.memory_gib * 2**30,
        )


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


def parameter_bytes(model: Model, layer: Layer) -> int:
    """Bytes of the parameters of a layer, each once."""
    buckets = dict.fromkeys(bucket for region in layer for bucket in region.buckets)
    return sum(spec.nbytes for bucket in buckets for spec in model.buckets[bucket].specs)


def kept_bytes(model: Model, region: Region) -> int:
    """Bytes of the activations that a region keeps from its forward to its backward."""
    inputs = (model.values[region.inputs[k]] for k in region.backward_inputs)
    read_again = sum(value.nbytes for value in inputs if value.role is Role.ACTIVATION)
    return read_again + sum(spec.nbytes for spec in region.saved)


def retagged(model: Model, name: str, stage_of: Mapping[RegionId, int]) -> Model:
    """The same model, its regions under one more tag."""
    regions, seen = [], Counter[Tags]()
    for region in model.regions:
        tags = with_tag(region.tags, name, stage_of[region.id])
        regions.append(region.named(tags=tags, run=seen[tags]))
        seen[tags] += 1
    return model.retagged(tuple(regions))


def with_tag(tags: Tags, name: str, stage: int) -> Tags:
    """In the place of the same tag, or else in front of all others.

    >>> with_tag((("L", 3),), "PP", 1)
    (('PP', 1), ('L', 3))
    """
    if name not in dict(tags):
        return ((name, stage), *tags)
    return tuple((key, stage if key == name else index) for key, index in tags)


def live_counts(live: object, stages: int) -> tuple[int, ...]:
    found = tuple(live) if isinstance(live, list | tuple) else ()
    if len(found) != stages or any(type(one) is not int or one < 1 for one in found):
        example = list(range(stages, 0, -1)) if stages <= SHOWN else [stages, stages - 1, "..."]
        what = f"live={live!r} does not say how many microbatches each of {stages} stages holds"
        raise Refused(Problem(what, f"write live={example}, as 1F1B holds them"))
    return found


def stage_speeds(speeds: object, stages: int) -> tuple[float, ...]:
    found = tuple(speeds) if isinstance(speeds, list | tuple) else ()
    if len(found) != stages:
        what = f"speeds={speeds!r} does not say how fast each of {amount(stages, 'stage')} is"
        raise Refused(Problem(what, f"write a number for each: speeds={[2] + [1] * (stages - 1)}"))
    for speed in found:
        require_size("speed", speed)
    return found


def require_size(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise Refused(Problem(f"{name}={value!r} is not a size", "write a number above 0"))


def require_all_layers(sizes: Sequence[int], layers: int) -> None:
    if sum(sizes) != layers:
        found = f"the stages {list(sizes)} have {amount(sum(sizes), 'layer')}"
        what = f"{found}, but the model has {layers}"
        raise Refused(Problem(what, f"write sizes that add up to {layers}"))


def too_few_layers(layers: int, stages: int) -> Problem:
    return Problem(
        f"the model has {amount(layers, 'layer')}, too few for {stages} stages",
        'annotate more layers, `with piper.annotate("L"):` around each, or find them with '
        f"piper.tag_layers(model, ...); or use at most {amount(layers, 'stage')}",
    )


def rounded_up(number: float) -> float:
    """To three digits.

    >>> rounded_up(6.1234)
    6.13
    """
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.ceil(number / digit) * digit


def too_little_memory(memory: Memory, stages: int) -> Problem:
    least = smallest_limit(memory, stages) / 2**30
    return Problem(
        f"no cut into {stages} stages fits into {memory.limit / 2**30:,.4g} GiB per stage",
        f"write memory_gib={rounded_up(least):.3g} or more, use more stages or smaller "
        "microbatches, or shard and recompute",
    )
