"""Mixed precision: every strategy trains as a plain loop that keeps masters by hand."""

from __future__ import annotations

import pytest
import torch
from mixed_precision import ADAMW, BF16, STEPS, TIGHT, ByHand, batches, captured, reference
from runtime.test_replicate import LEVELS, legal, stages_of
from runtime.test_shard import ROUTINGS
from shared_capture import using
from torch import Tensor

from piper import Place, Precision, Remat, Split, Strategy, rehearse, where
from piper.job.rehearsal import Rehearsal
from piper.strategies import BUILDERS

ONE = Strategy([Place(where(), [0]), Split("MB", 4)])


def run(
    name: str, strategy: Strategy, precision: Precision, replicas: int, max_norm: float | None
) -> tuple[Rehearsal, ByHand]:
    """All devices as threads of this process, and the loop."""
    stages, parts = max(stages_of(strategy), 2), replicas * strategy.microbatches
    model, loss, known = captured(name, stages, precision)
    with using(known):
        found = rehearse(
            model, loss, strategy, batches(name, parts),
            optimizer=ADAMW, precision=precision, max_norm=max_norm,
        )  # fmt: skip
    return found, reference(name, stages, precision, parts, max_norm)


def assert_close(found: Rehearsal, wanted: ByHand, tolerance: float) -> None:
    for step in range(STEPS):
        for part, loss in wanted.losses[step].items():
            assert found.parts[step][part] == pytest.approx(loss, rel=tolerance), (step, part)
        assert found.grad_norms[step] == pytest.approx(wanted.norms[step], rel=tolerance)
    for name, master in wanted.masters.items():
        close(found.parameters[name], master, tolerance, name)


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    error = (found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-30)
    assert found.dtype == wanted.dtype, what
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


# Sums in another order differ by the last digits of `compute` in activations: 1e-7 in float32.


LEVELS_OF = {name: LEVELS[k % 2 :: 2] for k, name in enumerate(BUILDERS)}  # of others: soaks


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        pytest.param(name, zero, marks=() if zero in LEVELS_OF[name] else pytest.mark.soak)
        for name in BUILDERS
        for zero in LEVELS
    ],
)
def test_every_schedule_with_every_level(schedule: str, zero: int) -> None:
    """Frozen and tied parameters, sizes that divide by nothing, and clipping at two levels."""
    strategy = legal(schedule, 2, dp=1 if schedule == "dualpipe" else 2, zero=zero)
    max_norm = 0.05 if zero % 2 else None

    found, wanted = run("uneven", strategy, TIGHT, 2, max_norm)

    assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize(
    ("schedule", "zero"), [("1f1b", 0), ("zbv", 1), ("dualpipe", 2), ("1f1b", 3)]
)
def test_experts_with_every_level(schedule: str, zero: int) -> None:
    """EP=2 on PP=2 x DP=2 (DualPipe: DP=1, twice); every other level recomputes."""
    strategy = legal(schedule, 2, dp=1 if schedule == "dualpipe" else 2, ep=2, zero=zero)
    name = f"moe {ROUTINGS[zero]}"

    found, wanted = run(name, strategy + Remat(where()) if zero % 2 else strategy, TIGHT, 2, 0.5)

    assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_one_device_in_bfloat16_is_bitwise_the_loop(reduce: str, max_norm: float | None) -> None:
    found, wanted = run("normed", ONE, Precision(reduce=reduce), 1, max_norm)

    assert [dict(parts) for parts in found.parts] == wanted.losses
    for name, master in wanted.masters.items():
        assert found.parameters[name].dtype == torch.float32
        assert torch.equal(found.parameters[name], master), name


@pytest.mark.parametrize("zero", LEVELS)
def test_replicas_in_bfloat16(zero: int) -> None:
    """Gradients differ by the order of sums in float32, and updates of masters by no more."""
    strategy = legal("1f1b", 2, dp=2, zero=zero)

    found, wanted = run("normed", strategy, BF16, 2, 0.05)

    assert_close(found, wanted, 1e-6)
