"""Regions whose activations wait in host memory train as regions that keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from pool import run_on
from replicas import assert_same, plain, train_all
from runtime.test_remat import (
    MIDDLES,
    assert_bitwise,
    assert_plain,
    of_two_stages,
    position,
    run,
)
from runtime.test_replicate import LEVELS, legal, stages_of
from runtime.test_shard import ROUTINGS

from piper import Offload, where
from piper.runtime.host_memory import OtherMemory, copied
from piper.strategies import BUILDERS, gpipe, zb_h1

WHERE = (where(), where(EP="*"), where(EP=None), where(PP=0))
AHEAD = ((1, 2), (0, 1), (2, 1), (0, 2))  # and buffers
QUICK = (("gpipe", 0), ("1f1b", 3), ("zb-h1", 1), ("zbv", 2), ("dualpipe", 3))
CASES = [
    pytest.param(schedule, zero, marks=[] if (schedule, zero) in QUICK else [pytest.mark.soak])
    for schedule in BUILDERS
    for zero in LEVELS
]


@pytest.fixture
def copies() -> Iterator[Counter[str]]:
    """How many copies there were, in each direction."""
    found: Counter[str] = Counter()
    store, fetch = OtherMemory.store, OtherMemory.fetch

    def counted(name: str, start: object) -> object:
        def copy(self: OtherMemory, value: object, stream: str) -> object:
            found[name] += 1
            return start(self, value, stream)  # type: ignore[operator]

        return copy

    with (
        patch.object(OtherMemory, "store", counted("store", store)),
        patch.object(OtherMemory, "fetch", counted("fetch", fetch)),
    ):
        yield found


def offload(zero: int, schedule: str) -> Offload:
    ahead, buffers = AHEAD[(zero + position(schedule)) % 4]
    return Offload(WHERE[zero], ahead=ahead, buffers=buffers)


@pytest.mark.parametrize(("schedule", "zero"), CASES)
def test_every_schedule_with_every_level_on_experts(
    schedule: str, zero: int, copies: Counter[str]
) -> None:
    """PP=2 x DP=2 (DualPipe: DP=1, twice), EP=2; other regions at each level."""
    strategy = legal(schedule, 2, dp=1 if schedule == "dualpipe" else 2, ep=2, zero=zero)
    name = f"moe {ROUTINGS[zero]}"

    found = run(name, strategy + offload(zero, schedule), 2)

    assert copies["store"] > 0
    assert copies["fetch"] >= copies["store"]
    assert_plain(found, name, strategy, 2)
    assert_bitwise(found, run(name, strategy, 2))


@pytest.mark.parametrize(("schedule", "zero"), [("gpipe", 1), ("zbv", 3)])
def test_recomputed_regions_move_their_inputs(
    schedule: str, zero: int, copies: Counter[str]
) -> None:
    """Frozen and tied parameters, and sizes that divide by nothing."""
    strategy = legal(schedule, 2, dp=2, zero=zero, remat=True)

    found = run("uneven", strategy + Offload(where(), ahead=0, buffers=1), 2)

    assert copies["store"] > 0
    assert_bitwise(found, run("uneven", strategy, 2))


@pytest.mark.parametrize("builder", [gpipe, zb_h1])
@pytest.mark.parametrize("middle", MIDDLES)
def test_dropout_and_buffers(middle: str, builder: type, copies: Counter[str]) -> None:
    strategy = builder(pp=2, microbatches=4)

    found = of_two_stages(middle, strategy + Offload(where(), ahead=0, buffers=1))

    assert copies["store"] > 0
    assert_bitwise(found, of_two_stages(middle, strategy))


@pytest.mark.soak
def test_compiled_kernels_read_what_comes_back() -> None:
    strategy = gpipe(pp=2, microbatches=4)
    kept = of_two_stages("dropout", strategy, compiled=True)

    found = of_two_stages("dropout", strategy + Offload(where()), compiled=True)

    assert_bitwise(found, kept)


@pytest.mark.soak
def test_in_processes() -> None:
    strategy = legal("1f1b", 2, dp=2, ep=2, zero=3) + Offload(where(), ahead=0, buffers=1)
    stages, parts = stages_of(strategy), 2 * strategy.microbatches

    runs = run_on(4, train_all, "moe skewed", stages, parts, [strategy.to_json()])

    assert_same([row[0] for row in runs], plain("moe skewed", stages, parts, parts))


# Copies keep shapes, strides and aliases

BASE = torch.arange(60.0).view(5, 12)
BUNDLES = {
    "dense": lambda: (BASE, BASE.clone().t()),
    "expanded": lambda: (torch.ones(3, 1).expand(3, 4), torch.tensor(2.0).expand(2, 2)),
    "slices of one tensor": lambda: tuple(BASE.split(4, dim=1)),
    "windows": lambda: (BASE.unfold(1, 5, 2),),
    "other types": lambda: (BASE.int(), BASE.bool(), BASE.view(torch.int32)[1:]),
    "nothing": lambda: (),
    "empty": lambda: (torch.empty(0, 3), torch.empty(2, 0).t()),
    "numbers": lambda: (3, BASE[2], None),
    "one tensor": lambda: BASE[1:3, ::2],
}


@pytest.mark.parametrize("name", BUNDLES)
def test_a_copy_is_like_its_original(name: str) -> None:
    given = BUNDLES[name]()

    found = copied(copied(given, torch.clone), torch.clone)

    both = [given] if isinstance(given, torch.Tensor) else list(given)
    again = [found] if isinstance(found, torch.Tensor) else list(found)
    for one, other in zip(both, again, strict=True):
        if not isinstance(one, torch.Tensor):
            assert one is other
            continue
        assert torch.equal(one, other)
        assert (one.stride(), one.dtype) == (other.stride(), other.dtype)
        assert not one.numel() or other.data_ptr() != one.data_ptr()


def test_slices_of_one_tensor_are_copied_once() -> None:
    sizes: list[int] = []

    def copy(flat: torch.Tensor) -> torch.Tensor:
        sizes.append(flat.numel())
        return flat.clone()

    copied(BASE.split(4, dim=1), copy)

    assert sizes == [60]
