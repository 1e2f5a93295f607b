"""Regions whose activations wait in host memory train as regions that keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from draws import SOAK, every
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
from torch import nn
from torch.nn import functional

from piper import Offload, Place, Split, Strategy, Trainer, where
from piper.directives import Directive
from piper.directives.offload import What
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal, rehearsed
from piper.runtime.checkpoint.reader import put
from piper.runtime.host_memory import OtherMemory, copied
from piper.runtime.state.device_state import BucketState
from piper.strategies import BUILDERS, gpipe, one_f_one_b, zb_h1

State = dict[str, torch.Tensor] | None
WHERE = (where(), where(EP="*"), where(EP=None), where(PP=0))
AHEAD = ((1, 2), (0, 1), (2, 1), (0, 2))  # and buffers
ALL: tuple[What, ...] = ("activations", "optimizer", "parameters")
KINDS: dict[str, tuple[What, ...]] = {**{what: (what,) for what in ALL}, "all": ALL}
QUICK = ("zb-h1", 1, "all"), ("dualpipe", 3, "parameters")
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.soak])
    for case in product(BUILDERS, LEVELS, KINDS)
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


@pytest.mark.parametrize(("schedule", "zero", "kind"), CASES)
def test_every_schedule_with_every_level_on_experts(
    schedule: str, zero: int, kind: str, copies: Counter[str]
) -> None:
    """PP=2 x DP=2 (DualPipe: DP=1, twice), EP=2; other regions at each level."""
    strategy = legal(schedule, 2, dp=1 if schedule == "dualpipe" else 2, ep=2, zero=zero)
    name = f"moe {ROUTINGS[zero]}"
    ahead, buffers = AHEAD[(zero + position(schedule)) % 4]
    away = [Offload(WHERE[zero], what, ahead=ahead, buffers=buffers) for what in KINDS[kind]]

    found = run(name, Strategy([*strategy, *away]), 2)

    assert copies["fetch"] >= copies["store"] > 0
    assert_plain(found, name, strategy, 2)
    assert_bitwise(found, run(name, strategy, 2))


def away(strategy: Iterable[Directive], *kinds: What, **copies: int) -> Strategy:
    """The strategy with these in host memory; all kinds if none is named."""
    return Strategy([*strategy, *(Offload(where(), what, **copies) for what in kinds or ALL)])


@pytest.mark.parametrize(
    ("schedule", "zero"), every(4, [("zbv", 3), ("gpipe", 0), ("1f1b", 1), ("zb-h1", 2)])
)
def test_recomputed_regions_move_their_inputs(
    schedule: str, zero: int, copies: Counter[str]
) -> None:
    """Frozen and tied parameters, and sizes that divide by nothing."""
    strategy = legal(schedule, 2, dp=2, zero=zero, remat=True)

    found = run("uneven", away(strategy, ahead=0, buffers=1), 2)

    assert copies["store"] > 0
    assert_bitwise(found, run("uneven", strategy, 2))


@pytest.mark.parametrize(("middle", "builder"), every(3, product(MIDDLES, (gpipe, zb_h1))))
def test_dropout_and_buffers(middle: str, builder: type, copies: Counter[str]) -> None:
    strategy = builder(pp=2, microbatches=4)

    found = of_two_stages(middle, away(strategy, ahead=0, buffers=1))

    assert copies["store"] > 0
    assert_bitwise(found, of_two_stages(middle, strategy))


@pytest.mark.soak
def test_compiled_kernels_read_what_comes_back() -> None:
    strategy = gpipe(pp=2, microbatches=4)
    kept = of_two_stages("dropout", strategy, compiled=True)

    found = of_two_stages("dropout", away(strategy), compiled=True)

    assert_bitwise(found, kept)


@pytest.mark.soak
@pytest.mark.parametrize("zero", LEVELS)
def test_in_processes(zero: int) -> None:
    strategy = away(legal("1f1b", 2, dp=2, ep=2, zero=zero), ahead=0, buffers=1)
    stages, parts = stages_of(strategy), 2 * strategy.microbatches

    runs = run_on(4, train_all, "moe skewed", stages, parts, [strategy.to_json()])

    assert_same([row[0] for row in runs], plain("moe skewed", stages, parts, parts))


# Masters, checkpoints, and all that reads parameters between steps


@pytest.mark.parametrize(("precision", "zero"), every(8, product(("fp16", "bf16"), LEVELS)))
def test_masters_wait_with_the_optimizer(precision: str, zero: int) -> None:
    """And compute copies without them, or with them."""
    strategy = one_f_one_b(pp=2, dp=2, zero=zero, microbatches=4)
    kinds = [KINDS[kind] for kind in (*(("optimizer",) if SOAK else ()), "parameters", "all")]

    kept, *others = sharing_a_capture(
        [strategy, *(away(strategy, *kind) for kind in kinds)], squares, precision=precision
    )

    for found in others:
        assert_bitwise(found, kept)


def sharing_a_capture(
    strategies: list[Strategy], loss: Callable[..., torch.Tensor], **options: Any
) -> list[Rehearsal]:
    given = Options(optimizer=ADAMW, device="cpu", graphs=False, **options)
    job = Job(net("dropout"), loss, strategies[0], given)
    return [rehearsed(job.under(one), [*map(job.example, data())]) for one in strategies]


def test_clipping_and_everything_at_once() -> None:
    given: dict[str, Any] = {"pp": 2, "dp": 2, "zero": 2, "microbatches": 4, "remat": "matmuls"}

    kept, found = sharing_a_capture(
        [gpipe(**given), gpipe(**given, offload=ALL)], functional.mse_loss, max_norm=0.1
    )

    assert_bitwise(found, kept)


OPTIONS: dict[str, Any] = {"optimizer": ADAMW, "device": "cpu", "precision": "bf16"}
PLACED = (Place(where(), [0]), Split("MB", 2))


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Saved with everything in host memory, and resumed there or on the device."""
    batches = [*data(), *data()]
    options = {**OPTIONS, "example": data()[0]}
    with closing(Trainer(net("dropout"), squares, PLACED, **options)) as whole:
        wanted = [whole.step(*batch).loss for batch in batches]
        theirs = whole.state_dict()
    with closing(Trainer(net("dropout"), squares, away(PLACED), **options)) as first:
        before = [first.step(*batch).loss for batch in batches[:2]]
        first.save(tmp_path / "run")
    for again in (PLACED, away(PLACED)):
        with closing(Trainer(net("dropout"), squares, again, **options)) as second:
            second.resume(tmp_path / "run")
            found = [*before, *(second.step(*batch).loss for batch in batches[2:])]
            assert found == wanted
            assert_equal(second.state_dict(), theirs)


def assert_equal(ours: State, theirs: State) -> None:
    assert ours and theirs and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("precision", every(2, [None, "bf16"]))
def test_tools_see_the_parameters(precision: str | None) -> None:
    """Evaluation, prediction, averages, and another strategy in between."""
    batch, options = data()[0], {**OPTIONS, "precision": precision, "example": data()[0]}

    def story(first: Iterable[Directive], then: Iterable[Directive]) -> list[object]:
        with closing(Trainer(net("dropout"), squares, first, ema=0.9, **options)) as trainer:
            seen: list[object] = [trainer.step(*one).loss for one in data()]
            seen += [trainer.evaluate([batch]).loss, trainer.predict(batch[0]).tolist()]
            with trainer.averaged():
                seen += [trainer.evaluate([batch]).loss, weights_of(trainer)]
            trainer.retarget(then)
            seen += [trainer.step(*one).loss for one in data()]
            return [*seen, trainer.evaluate([batch]).loss, weights_of(trainer)]

    kept = story(PLACED, PLACED)

    assert story(away(PLACED), PLACED) == kept
    assert story(PLACED, away(PLACED)) == kept
    assert story(away(PLACED, "parameters"), away(PLACED)) == kept


def weights_of(trainer: Trainer) -> dict[str, object]:
    return {name: tensor.tolist() for name, tensor in (trainer.state_dict() or {}).items()}


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_states_that_are_read_go_where_their_update_expects_them(
    offloaded: bool, fused: bool
) -> None:
    """Parameters in host memory, of a device without memory: moments are on the device, or wait in
    host memory; step counts are where the optimizer reads them."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    bucket = BucketState(
        "b", ("p",), (parameter.shape,), (parameter.data,), (parameter,), optimizer
    )
    bucket.device, bucket.on_host, bucket.optimizer_on_host = torch.device("meta"), True, offloaded

    put(bucket, [{"": torch.ones(3), "exp_avg": torch.ones(3), "step": torch.tensor(2.0)}])

    held = optimizer.state[parameter]
    assert parameter.device.type == "cpu" and parameter.tolist() == [1.0] * 3
    assert held["exp_avg"].device.type == ("cpu" if offloaded else "meta")
    assert held["step"].device.type == ("meta" if fused else "cpu")


def test_the_memory_of_the_host_is_used_again() -> None:
    """Pinned memory is slow to get, and there may be none left for a second copy."""
    options = {**OPTIONS, "example": data()[0]}
    with closing(Trainer(net("dropout"), squares, away([PLACED[0]]), **options)) as trainer:
        found = []
        for batch in [*data(), *data()]:
            trainer.step(*batch)
            held = trainer._programs.state
            states = [state for one in held.optimizers().values() for state in one.state.values()]
            memory = [state["exp_avg"] for state in states]
            memory += [tensor for one in held.buckets.values() for tensor in one.tensors]
            found.append([tensor.data_ptr() for tensor in memory])

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
