"""What a device sends in a step equals the closed form of its level."""

from __future__ import annotations

import pytest
from draws import one_of
from synthetic import TOKENS, chain, moe_chain

from piper.directives import Order, Place, Replicate, Shard, Split
from piper.ir.filters import where
from piper.job.compile.compiler import compile_strategy
from piper.plan.analyse.traffic import traffic

BUCKET = 4 * 4 * 4  # bytes of a region's parameters in a chain
ROW = 2 * 4 * 4  # bytes of what goes from region to region


def sent(zero: int, n: int, parts: int, regions: int = 4, **options: object) -> dict[str, int]:
    """By each of n replicas of all regions, one microbatch after the other."""
    devices = list(range(n))
    passes = [(k, "F") for k in range(regions)] + [(k, "B") for k in reversed(range(regions))]
    order = [where(PP=k, MB=m, PASS=phase) for m in range(parts) for k, phase in passes]
    keep = Replicate(
        where(), devices, zero=zero, reduce_stream="reduce", gather_stream="gather", **options
    )
    program = [Place(where(), devices), keep, Split("MB", parts), Order(order)]
    found = [traffic(plan) for plan in compile_strategy(chain(regions), program).plans]
    assert all(one == found[0] for one in found)
    return found[0]


@one_of(2)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("parts", [1, 3])
def test_gradients_travel_as_often_as_the_level_says(n: int, parts: int) -> None:
    once = 4 * BUCKET * (n - 1) // n  # what one reduce-scatter or gather of everything sends

    assert sent(0, n, parts) == {"reduce": 2 * once}
    assert sent(1, n, parts) == {"reduce": once, "gather": once}
    assert sent(2, n, parts) == {"reduce": parts * once, "gather": once}
    assert sent(3, n, parts)["reduce"] == parts * once
    assert sent(3, n, parts, reduce="once")["reduce"] == once


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_parameters_are_gathered_when_no_buffer_holds_them(buffers: int) -> None:
    """At every turn from forward to backward, and back, the last `buffers` regions are there."""
    regions, parts, n = 4, 3, 2
    one = BUCKET * (n - 1) // n
    missing = regions - buffers

    found = sent(3, n, parts, gather_buffers=buffers, gather_ahead=0)

    assert found["gather"] == one * (regions + missing * (2 * parts - 1))


@pytest.mark.parametrize("zero", range(4))
def test_the_size_of_messages_does_not_change_what_is_sent(zero: int) -> None:
    assert sent(zero, 2, 2, bucket_mb=1e-6) == sent(zero, 2, 2, bucket_mb=100)


def test_a_pipeline_sends_activations_and_gradients_beside() -> None:
    places = [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])]
    keep = [Replicate(where(PP=0), [0, 2], zero=2), Replicate(where(PP=1), [1, 3], zero=2)]

    plans = compile_strategy(chain(2), [*places, *keep, Split("MB", 4)]).plans

    for plan in plans:
        assert traffic(plan) == {"pp": 4 * ROW, "dp": 4 * BUCKET // 2 + BUCKET // 2}


@pytest.mark.parametrize(("groups", "ways"), [([0, 1, 2, 3], 4), ([[0, 1], [2, 3]], 2)])
def test_rows_go_to_their_experts_and_back_forward_and_backward(groups: list, ways: int) -> None:
    four, parts, layers = [0, 1, 2, 3], 3, 2
    keep = Replicate(where(), four, zero=1)
    cut, split = Shard(where(EP="*"), groups), Split("MB", parts)

    plans = compile_strategy(moe_chain(1, layers), [Place(where(), four), keep, cut, split]).plans

    for plan in plans:
        assert traffic(plan)["ep"] == 4 * parts * layers * (TOKENS.nbytes * (ways - 1) // ways)
