"""Regions whose activations wait in host memory train as regions that keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from mixed_precision import squares
from pool import run_on
from replicas import ADAMW, assert_same, data, plain, train_all
from runtime.test_remat import (
    MIDDLES,
    assert_bitwise,
    assert_plain,
    net,
    of_two_stages,
    position,
    run,
)
from runtime.test_replicate import LEVELS, legal, stages_of
from runtime.test_shard import ROUTINGS
from torch.nn import functional

from piper import Offload, Place, Split, Trainer, rehearse, where
from piper.runtime.host_memory import OtherMemory, copied
from piper.strategies import BUILDERS, gpipe, one_f_one_b, zb_h1

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
        def copy(self: OtherMemory, value: object, stream: str, *pages: object) -> object:
            found[name if stream else "at first"] += 1
            return start(self, value, stream, *pages)  # type: ignore[operator]

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


# Optimizer state


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("zb-h1", 1), ("zbv", 3)])
def test_optimizer_state_of_every_level_on_experts(
    schedule: str, zero: int, copies: Counter[str]
) -> None:
    """Experts, shards and whole parameters; AdamW has a step count beside its moments."""
    strategy = legal(schedule, 2, dp=2, ep=2, zero=zero)
    name = f"moe {ROUTINGS[zero]}"

    found = run(name, strategy + Offload(WHERE[zero], "optimizer", ahead=zero), 2)

    assert copies["store"] == copies["fetch"] > 0
    assert_plain(found, name, strategy, 2)
    assert_bitwise(found, run(name, strategy, 2))


@pytest.mark.parametrize("zero", [0, 3])
def test_masters_wait_with_the_optimizer(zero: int) -> None:
    strategy = one_f_one_b(pp=2, dp=2, zero=zero, microbatches=4)

    kept, found = (
        rehearse(net("dropout"), squares, one, data(), optimizer=ADAMW, precision="bf16")
        for one in (strategy, strategy + Offload(where(), "optimizer"))
    )

    assert_bitwise(found, kept)


def test_clipping_and_everything_at_once() -> None:
    strategy = gpipe(pp=2, dp=2, zero=2, microbatches=4, remat="matmuls")
    offloaded = gpipe(
        pp=2, dp=2, zero=2, microbatches=4, remat="matmuls", offload=["activations", "optimizer"]
    )

    kept, found = (
        rehearse(net("dropout"), functional.mse_loss, one, data(), optimizer=ADAMW, max_norm=0.1)
        for one in (strategy, offloaded)
    )

    assert_bitwise(found, kept)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_goes_on_from_a_checkpoint(resumed: bool, tmp_path: Path) -> None:
    """Saved with optimizer state in host memory, and resumed there or on the device."""
    batches = [*data(), *data()]
    options = {"optimizer": ADAMW, "example": data()[0], "device": "cpu", "precision": "bf16"}
    place = [Place(where(), [0]), Split("MB", 2)]
    moved = [*place, Offload(where(), "optimizer")]

    with closing(Trainer(net("dropout"), squares, place, **options)) as whole:
        wanted = [whole.step(*batch).loss for batch in batches]
        theirs = whole.state_dict()
    with closing(Trainer(net("dropout"), squares, moved, **options)) as first:
        found = [first.step(*batch).loss for batch in batches[:2]]
        first.save(tmp_path / "run")
    again = place if resumed else moved
    with closing(Trainer(net("dropout"), squares, again, **options)) as second:
        second.resume(tmp_path / "run")
        found += [second.step(*batch).loss for batch in batches[2:]]
        ours = second.state_dict()

    assert found == wanted
    assert ours and theirs and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_memory_of_the_host_is_used_again() -> None:
    """Pinned memory is slow to get, and there may be none left for a second copy."""
    strategy = [Place(where(), [0]), Offload(where(), "optimizer")]
    options = {"optimizer": ADAMW, "example": data()[0], "device": "cpu", "precision": "bf16"}
    with closing(Trainer(net("dropout"), squares, strategy, **options)) as trainer:
        found = []
        for batch in [*data(), *data()]:
            trainer.step(*batch)
            held = trainer._programs.state.optimizers().values()
            states = [state for one in held for state in one.state.values()]
            found.append([state["exp_avg"].data_ptr() for state in states])

    assert found[0] and all(one == found[0] for one in found)


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
