"""Compiling costs what the DAG is large: counted in function calls, not in seconds."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable

import pytest
from draws import one_of
from synthetic import chain, moe_chain

from piper.directives import Directive, Order, Place, Replicate, Shard, Split
from piper.ir.filters import where
from piper.job.compile.compiler import compile_strategy

AT_MOST = 2.3  # times the calls for twice the nodes


def calls(act: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(act)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def places(stages: int, devices: int) -> list[Directive]:
    return [Place(where(PP=s), [s % devices]) for s in range(stages)]


def microbatches(n: int) -> object:
    return compile_strategy(chain(4), [*places(4, 4), Split("MB", n)])


def slots(n: int) -> object:
    rows = [
        Order([where(PP=s, MB=m, PASS=p) for m in range(n) for p in ("F", "BI", "BW")])
        for s in range(4)
    ]
    return compile_strategy(chain(4), [*places(4, 4), Split("MB", n), *rows])


def stages_on_one_device(n: int) -> object:
    return compile_strategy(chain(n), [Place(where(), [0]), Split("MB", 2)])


def stages_on_eight_devices(n: int) -> object:
    return compile_strategy(chain(n), [*places(n, 8), Split("MB", 2)])


def stages_placed_after_the_split(n: int) -> object:
    return compile_strategy(chain(n), [Split("MB", 2), *places(n, 8)])


def uses_of_one_value(n: int) -> object:
    skips = tuple((0, b) for b in range(2, n))
    return compile_strategy(chain(n, skips), [Place(where(), [0]), Split("MB", 2)])


def replicates(stages: int, zero: int, buffers: int) -> list[Directive]:
    """Two replicas on four devices, two stages on each."""
    devices = [[s % 2, s % 2 + 2] for s in range(stages)]
    placed = [Place(where(PP=s), found) for s, found in enumerate(devices)]
    kept = [
        Replicate(where(PP=s), found, zero, gather_buffers=buffers)
        for s, found in enumerate(devices)
    ]
    return [*placed, *kept]


def microbatches_with_sharded_gradients(n: int) -> object:
    return compile_strategy(chain(4), [*replicates(4, zero=2, buffers=1), Split("MB", n)])


def microbatches_with_gathered_parameters(n: int) -> object:
    """One buffer for two stages: it is filled again and again."""
    return compile_strategy(chain(4), [*replicates(4, zero=3, buffers=1), Split("MB", n)])


def stages_with_gathered_parameters(n: int) -> object:
    return compile_strategy(chain(n), [*replicates(n, zero=3, buffers=2), Split("MB", 2)])


def experts(stages: int, parts: int) -> object:
    """The last stage has a forward and a backward in each slot: tokens of one travel meanwhile."""
    cuts = [Shard(where(PP=s, EP="*"), [s % 2, s % 2 + 2]) for s in range(stages)]
    forwards = [where(PP=stages - 1, MB=m, PASS="F") for m in range(parts)]
    backwards = [where(PP=stages - 1, MB=m, PASS="B") for m in range(parts)]
    pairs = zip(forwards[1:], backwards, strict=False)
    order = Order([forwards[0], *map(list, pairs), backwards[-1]])
    program = [*replicates(stages, zero=2, buffers=1), *cuts, Split("MB", parts), order]
    return compile_strategy(moe_chain(stages), program)


def microbatches_with_experts(n: int) -> object:
    return experts(2, n)


def stages_with_experts(n: int) -> object:
    return experts(n, 2)


@one_of(3)
@pytest.mark.parametrize(
    ("compiled", "size"),
    [
        (microbatches, 40),
        (slots, 32),
        pytest.param(stages_on_one_device, 60, marks=pytest.mark.soak),
        (stages_on_eight_devices, 40),
        pytest.param(stages_placed_after_the_split, 60, marks=pytest.mark.soak),
        (uses_of_one_value, 40),
        pytest.param(microbatches_with_sharded_gradients, 40, marks=pytest.mark.soak),
        pytest.param(microbatches_with_gathered_parameters, 40, marks=pytest.mark.soak),
        (stages_with_gathered_parameters, 24),
        (microbatches_with_experts, 8),
        (stages_with_experts, 8),
    ],
)
def test_twice_the_nodes_cost_twice_the_calls(compiled: Callable[[int], object], size: int) -> None:
    compiled(4)

    once, twice = (calls(lambda n=n: compiled(n)) for n in (size, 2 * size))

    assert twice / once < AT_MOST


def regions_on_one_device(n: int) -> object:
    return compile_strategy(chain(n), [Place(where(), [0]), Split("MB", 1)])


def regions_with_gathered_parameters(n: int) -> object:
    placed = [Place(where(), [0, 1]), Replicate(where(), [0, 1], 3)]
    return compile_strategy(chain(n), [*placed, Split("MB", 2)])


def seconds(compiled: Callable[[int], object], regions: int) -> float:
    """Of this thread, with nothing else in it."""
    started = time.thread_time()
    compiled(regions)
    return time.thread_time() - started


@pytest.mark.parametrize(
    "compiled",
    [
        regions_on_one_device,
        pytest.param(regions_with_gathered_parameters, marks=pytest.mark.soak),
    ],
)
def test_twelve_hundred_regions_take_four_times_as_long_as_three_hundred(
    compiled: Callable[[int], object],
) -> None:
    """In seconds, unlike the others: what is quadratic may be in a loop without calls. The least of
    several counts, as other processes take caches and cores."""
    few = min(seconds(compiled, 300) for _ in range(2))

    many = seconds(compiled, 1_200)
    if many > 6 * few:
        few, many = seconds(compiled, 300), min(many, seconds(compiled, 1_200))

    assert many < 6 * few  # quadratic: 16 times
