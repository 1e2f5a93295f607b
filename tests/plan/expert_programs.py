"""Random legal strategies on made-up models with experts, and the schedules of the library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import strategies as st
from plan.programs import (
    STREAMS,
    Program,
    random_halves,
    random_run,
    random_settings,
)  # fmt: skip
from synthetic import TOKENS, moe_chain

from piper.directives import Place, Replicate, Shard, Strategy
from piper.directives.order import Ahead
from piper.ir.filters import where
from piper.ir.model import Bucket, Model, Parameter
from piper.ir.values import TensorSpec
from piper.strategies import BUILDERS

Groups = list[list[int]]
UNKNOWN = TensorSpec((None, *TOKENS.shape[1:]))  # rows, of any number


def random_moe(random: Random, stages: int, copies: int, layers: int | None) -> Model:
    """As many experts as all numbers of devices divide, or a multiple."""
    experts = random.choice([copies, copies, 2 * copies])
    tokens, extra = random.choice([TOKENS, TOKENS, UNKNOWN]), random.choice([0, 0, 1])
    model = moe_chain(stages, layers or random.choice([1, 1, 2]), experts, tokens, extra)
    buckets = {name: varied(bucket, experts, random) for name, bucket in model.buckets.items()}
    regions = tuple(
        replace(region, backward_inputs=random_inputs(region.inputs, random), weight_inputs=())
        if "EP" in region.id
        else region
        for region in model.regions
    )
    return replace(model, buckets=buckets, regions=regions)


def random_inputs(inputs: Sequence[object], random: Random) -> tuple[int, ...]:
    return tuple(k for k in range(len(inputs)) if random.random() < 0.7)


def varied(bucket: Bucket, experts: int, random: Random) -> Bucket:
    """Several parameters of two types, of sizes that no number of shards divides; some frozen."""
    if "EP" not in bucket.id:
        return bucket
    shapes = [random.choice([(), (3,), (5,), (2, 2)]) for _ in range(random.randint(1, 3))]
    dtypes = [random.choice(["float32", "float32", "bfloat16"]) for _ in shapes]
    specs = [TensorSpec((experts, *s), dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
    named = tuple(Parameter(f"{bucket.id}.{k}", spec) for k, spec in enumerate(specs))
    return replace(bucket, parameters=named, trainable=random.random() < 0.85)


def random_experts(
    random: Random,
    stages: int,
    microbatches: int,
    copies: int,
    all_ordered: bool = False,
    overlapping: bool = True,
    layers: int | None = None,
) -> Program:
    """Stages anywhere, replicas of everything, experts divided among all of them or some."""
    device_of = [random.randrange(random.choice([1, stages])) for _ in range(stages)]
    share = 1.0 if all_ordered else random.choice([0.0, 0.5, 1.0])
    blank = Program(
        model=random_moe(random, stages, copies, layers),
        device_of=tuple(device_of),
        microbatches=microbatches,
        copies=copies,
        mirrored=copies % 2 == 0 and random.random() < 0.4,
        clip=random.random() < 0.5,
        split=microbatches > 1 or random.random() < 0.5,
        ordered=tuple(device for device in sorted({*device_of}) if random.random() < share),
        apart=random.random() < 0.5,
    )
    blank = replace(blank, halved=random_halves(blank, random))
    run = random_run(blank, random)
    share = random.choice([0.0, 0.3]) if overlapping else 0.0
    overlaps = frozenset(k for k in range(len(run)) if random.random() < share)
    ahead: Ahead = random.choice([False, True, "pairs", "pairs"]) if overlapping else False
    done = replace(blank, run=run, overlaps=overlaps, ahead=ahead)
    return with_directives(done, random)


def with_directives(program: Program, random: Random) -> Program:
    """`Replicate` and `Shard` for each stage, anywhere among the other directives."""
    last = len(program.directives)
    replicates, shards = [], []
    for stage in range(len(program.device_of)):
        cuts = random_shards(program, stage, random)
        shards += [(random.randint(0, last), cut) for cut in cuts]
        keep = random_replicates(stage, program.devices(stage), cuts, random)
        replicates += [(random.randint(0, last), one) for one in keep]
    return replace(program, replicates=tuple(replicates), shards=tuple(shards))


def random_shards(program: Program, stage: int, random: Random) -> list[Shard]:
    """One for all experts of a stage, or one for each layer, with groups of its own."""
    layers = [
        dict(region.tags)["EP"]
        for region in program.model.regions
        if ("PP", stage) in region.tags and "EP" in region.id
    ]
    tags: list[int | str] = [*layers] if random.random() < 0.4 else ["*"]
    return [
        Shard(
            where(PP=stage, EP=tag),
            random_groups(program.devices(stage), random),
            random.choice(["ep", *STREAMS]),
        )
        for tag in tags
    ]


def random_groups(devices: list[int], random: Random) -> Groups:
    """All devices together, or pairs of them; at times each by itself."""
    mixed = random.sample(devices, len(devices))
    ways = random.choice([n for n in (1, 2, 2, len(mixed), len(mixed)) if len(mixed) % n == 0])
    return [mixed[k : k + ways] for k in range(0, len(mixed), ways)]


def random_replicates(
    stage: int, devices: list[int], cuts: Sequence[Shard], random: Random
) -> Iterator[Replicate]:
    """One for all of a stage, or one for experts and one for the rest."""
    groups, several = cuts[0].sharding.groups, any(len(c.sharding.groups) > 1 for c in cuts)
    alike = len(cuts) == 1 and several
    mine = random.choice([devices, groups]) if alike else devices
    if random.random() < 0.5:
        yield Replicate(where(PP=stage), mine, **random_settings(random))
        return
    pairs = [devices[:2], devices[2:]] if len(devices) == 4 else devices
    yield Replicate(where(PP=stage, EP=None), pairs, **random_settings(random))
    if several or random.random() < 0.5:
        yield Replicate(where(PP=stage, EP="*"), mine, **random_settings(random))


@st.composite
def expert_programs(draw: st.DrawFn) -> Program:
    stages, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    copies, seed = draw(st.sampled_from([2, 2, 3, 4])), draw(st.integers(0, 2**32))
    return random_experts(Random(seed), stages, microbatches, copies)


def scheduled(name: str, microbatches: int, dp: int, ways: int, **options: Any) -> Strategy:
    """A schedule of the library on two devices times `dp`, with `Shard` written by hand."""
    strategy = BUILDERS[name](2, microbatches, dp=dp, **options)
    places = [one for one in strategy if isinstance(one, Place)]
    shards = [
        Shard(where(PP=dict(one.filter.items)["PP"], EP="*"), in_rows(one.devices, ways))
        for one in places
    ]
    return strategy + shards


def in_rows(devices: Sequence[int], ways: int) -> Groups:
    return [list(devices[k : k + ways]) for k in range(0, len(devices), ways)]
