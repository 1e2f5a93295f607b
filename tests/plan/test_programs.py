"""Any legal strategy compiles, and its plans compute what plain training computes."""

from __future__ import annotations

from random import Random

import pytest
from draws import drawn, draws, one_of
from hypothesis import given, settings
from plan.devices import EARLY, LATE, executed
from plan.exactness import STEPS, must_be_right
from plan.numbers import expected
from plan.programs import Program, programs, random_program
from synthetic import ROW, bucket, chain

from piper.directives import Order, Place, Split
from piper.ir.filters import where
from piper.ir.model import Model, Region
from piper.ir.values import Role, Value
from piper.job.compile.compiler import compile_strategy
from piper.names import BucketId, RegionId, ValueId


@drawn
@settings(max_examples=draws(25, 280))
@given(programs())
def test_any_legal_strategy_computes_what_plain_training_computes(program: Program) -> None:
    must_be_right(program)


@one_of(2)
@drawn
@pytest.mark.parametrize("seed", range(draws(10, 60)))
def test_any_total_order_that_the_dataflow_allows_is_accepted(seed: int) -> None:
    random = Random(seed)

    program = random_program(random, 5, 4, min_devices=3, all_ordered=True, overlapping=False)

    must_be_right(program)


def test_microbatches_of_a_deep_pipeline_may_go_in_opposite_orders() -> None:
    """Every device takes its microbatches in another order than its neighbours need them."""
    stages, parts = 4, 4
    places = [Place(where(PP=s), [s]) for s in range(stages)]
    orders = [
        Order([[where(PP=s, MB=m, PASS="F")] for m in range(parts)][:: (-1) ** s])
        for s in range(stages)
    ]
    model = chain(stages)

    plans = compile_strategy(model, [*places, Split("MB", parts), *orders]).plans

    for when in (EARLY, LATE):
        assert executed(model, plans, when, STEPS) == expected(model, parts, False, STEPS)


def region(k: int, reads: str, writes: str, *buckets: str, backward: bool) -> Region:
    return Region(
        id=RegionId(f"PP{k}"), tags=(("PP", k),), code="block", inputs=(ValueId(reads),),
        outputs=(ValueId(writes),), buckets=tuple(map(BucketId, buckets)), has_backward=backward,
        **({"output_grads": (0,), "saved": (ROW,)} if backward else {}),
    )  # fmt: skip


def model_of(*regions: Region) -> Model:
    names = dict.fromkeys(name for one in regions for name in one.buckets)
    values = {out: Value((ROW,)) for one in regions for out in one.outputs}
    values[ValueId("x")] = Value((ROW,), Role.BATCH)
    buckets = {name: bucket(name) for name in names}
    return Model(regions=regions, values=values, buckets=buckets, loss=ValueId("loss"))


@pytest.mark.parametrize("clip", [False, True])
def test_the_norm_has_gradients_that_come_to_the_home_of_a_parameter_from_elsewhere(
    clip: bool,
) -> None:
    """A region without backward is the first to use what another one trains."""
    model = model_of(
        region(0, "x", "seen", "w", backward=False), region(1, "x", "loss", "w", backward=True)
    )
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]

    plans = compile_strategy(model, places, clip=clip).plans

    assert executed(model, plans, EARLY, STEPS) == expected(model, 1, clip, STEPS)


def test_a_parameter_is_updated_after_its_last_use_even_if_that_has_no_gradient() -> None:
    """The last region reads `w` late, because what else it reads is long in coming."""
    far = [region(k, "x" if k == 0 else f"v{k - 1}", f"v{k}", backward=False) for k in range(6)]
    late = region(7, "v5", "seen", "w", backward=False)
    model = model_of(*far, region(6, "x", "loss", "w", backward=True), late)
    places = [Place(where(PP=k), [1 if k < 6 else 0]) for k in range(8)]

    plans = compile_strategy(model, places).plans

    assert executed(model, plans, EARLY, STEPS) == expected(model, 1, False, STEPS)
