"""Random strategies that divide weights, tokens and experts, against plain PyTorch."""

from __future__ import annotations

from random import Random

import dense_net as dense
import experts
import pytest
from job import test_divided_experts as mixtures

from piper import Place, Remat, Replicate, Shard, Split, Strategy, strategies, where
from piper.directives import Directive

HALVES = (strategies.zbv, strategies.dualpipev, strategies.interleaved_one_f_one_b)
BUILDERS = (
    strategies.gpipe,
    strategies.one_f_one_b,
    strategies.zb_h1,
    strategies.dualpipe,
    *HALVES,
)
AHEAD = (None, True, False, "pairs")
PLANS = (None, {"layers.*.up": "colwise"}, {"layers.0.down.weight": "rowwise"})
FEW = 1  # of the default suite; soaks draw many


def options(draw: Random) -> dict:
    """How state is kept, and what else a builder takes."""
    zero = draw.randrange(4)
    return {
        "zero": zero,
        "reduce": draw.choice(["each", "once"]) if zero == 3 else None,
        "bucket_mb": draw.choice([1e-6, 1e-4, 25.0]),
        "gather_ahead": draw.randrange(3),
        "gather_buffers": draw.randint(1, 3),
        "reduce_stream": draw.choice(["dp", "tp", "a"]),
        "gather_stream": draw.choice(["gather", "dp", "a"]),
    }


def built(draw: Random, **more: int) -> Strategy:
    """A builder with options at random, for four microbatches of all replicas together."""
    builder = draw.choice(BUILDERS)
    both = builder is strategies.dualpipe
    pp = 1 if builder in HALVES else 2
    unequal = [[1, 2], [2, 1]] if pp > 1 and not more else []  # experts are on all devices alike
    dp: int | list[int] = draw.choice([1, 2, *unequal])
    replicas = dp if isinstance(dp, int) else 2  # of a rank with one device, both are there
    parts = 4 // replicas // (2 if both else 1)
    if both and parts < 2:
        dp, parts = 1, 2
    one = {draw.choice(["tp", "cp"]): draw.choice([2, 2, 4])}
    parallel = draw.choice([one, {"tp": 2, "cp": 2}])
    return builder(
        pp=pp, microbatches=parts, dp=dp, remat=draw.random() < 0.3, ahead=draw.choice(AHEAD),
        **parallel, **more, **options(draw),
    )  # fmt: skip


def written(draw: Random) -> Strategy:
    """Directives by hand: each layer is divided in its own way, or not at all.

    The second layer may have other devices than the first, more or fewer, or some of them.
    """
    ways, dp = draw.choice([2, 2, 4]), draw.choice([1, 2])
    size = ways * dp
    first, more = draw.choice([0, 0, size, size, ways]), draw.choice([dp, dp, 1, 2])
    homes = [list(range(size)), list(range(first, first + more * ways))]
    kinds = [draw.choice(["weights", "tokens", None]) for _ in homes]
    kinds[draw.randrange(2)] = draw.choice(["weights", "tokens"])
    keep = options(draw)
    program: list[Directive] = []
    for layer, (home, kind) in enumerate(zip(homes, kinds, strict=True)):
        here = where(L=layer)
        program += [Place(here, home), Replicate(here, home, **keep)]
        if kind is not None:
            groups = [home[k : k + ways] for k in range(0, len(home), ways)]
            stream = draw.choice([None, "pp", "a", f"own{layer}"])
            program.append(Shard(here, groups, stream, kind))
        if draw.random() < 0.3:
            program.append(Remat(here))
    return Strategy([*program, Split("MB", 4 // max(dp, more))])


def with_plan(draw: Random) -> Strategy:
    devices = [0, 1]
    shard = Shard(where(), devices, what="weights", plan=draw.choice(PLANS))
    keep = Replicate(where(), devices, **options(draw))
    return Strategy([Place(where(), devices), keep, shard, Split("MB", 4)])


SEEDS = [seed if seed < FEW else pytest.param(seed, marks=pytest.mark.soak) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_divided_strategy_trains_as_plain_pytorch(seed: int) -> None:
    draw = Random(seed)
    make = (written, built, with_plan)[seed % 3]

    dense.agree(dense.run(make(draw)))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(24))
def test_any_divided_strategy_with_experts_trains_as_plain_pytorch(seed: int) -> None:
    draw = Random(seed)
    routing = draw.choice(list(experts.ROUTINGS))

    mixtures.agree(mixtures.run(routing, built(draw, ep=2)), routing)
