"""Mixed precision: every strategy trains as a plain loop that keeps masters by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draws import every, levels_of
from mixed_precision import (
    ADAMW,
    BF16,
    STEPS,
    TIGHT,
    ByHand,
    NormedByHand,
    batches,
    build,
    by_hand,
    captured,
    reference,
    train,
)
from pool import run_on
from runtime.test_replicate import LEVELS, legal, stages_of
from runtime.test_shard import ROUTINGS
from shared_capture import using
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Precision, Remat, Replicate, Split, Strategy, Trainer, rehearse, where
from piper.job.batch.batch import Batch
from piper.job.compile.assignment import assignment
from piper.job.compile.compiler import compile_strategy
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal
from piper.plan.analyse.memory import BUFFERS, MASTERS, OPTIMIZER, PARAMETERS, lasting, timeline
from piper.plan.instructions import Gather, Send
from piper.runtime.checkpoint.resume import reader_of
from piper.runtime.state.device_state import DeviceState
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


@pytest.mark.parametrize(("schedule", "zero"), levels_of(BUILDERS, LEVELS, nth=4))
def test_every_schedule_with_every_level(schedule: str, zero: int) -> None:
    """Frozen and tied parameters, sizes that divide by nothing, and clipping at two levels."""
    strategy = legal(schedule, 2, dp=1 if schedule == "dualpipe" else 2, zero=zero)
    max_norm = 0.05 if zero % 2 else None

    found, wanted = run("uneven", strategy, TIGHT, 2, max_norm)

    assert_close(found, wanted, 1e-6)
    tied = found.parameters["tied"]
    assert not torch.equal(tied, tied.float().double()), "a rounded copy of another stage"


@pytest.mark.parametrize(
    ("schedule", "zero"), every(4, [("dualpipe", 2), ("1f1b", 0), ("1f1b", 3), ("zbv", 1)])
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


@pytest.mark.parametrize("zero", every(3, LEVELS))
def test_replicas_in_bfloat16(zero: int) -> None:
    """Gradients differ by the order of sums in float32, and updates of masters by no more."""
    strategy = legal("1f1b", 2, dp=2, zero=zero)

    found, wanted = run("normed", strategy, BF16, 2, 0.05)

    assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize("zero", every(4, [None, *LEVELS]))
def test_modules_that_are_kept_compute_with_their_masters(zero: int | None) -> None:
    """A norm in float32: its inputs are converted, its parameters are not. Buckets have both."""
    strategy = ONE if zero is None else legal("1f1b", 2, dp=2, zero=zero)
    precision, data = Precision(keep=("norm",)), batches("normed", 4)
    model, loss, known = captured("normed", 2, precision)

    with using(known):
        found = rehearse(model, loss, strategy, data, optimizer=ADAMW, precision=precision)

    wanted = by_hand(NormedByHand(), loss, [precision] * STEPS, data, 4, kept=("norm",))
    if zero is None:
        assert [dict(parts) for parts in found.parts] == wanted.losses
    assert_close(found, wanted, 0.0 if zero is None else 1e-6)


# Checkpoints

SHARDS = legal("1f1b", 2, dp=2, zero=3)
COPIES = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)])
FLOAT32 = Precision(compute="float32")
CHANGES = {
    "the same": (BF16, BF16),
    "no precision later": (BF16, None),
    "no precision before": (None, BF16),
    "finer masters later": (BF16, TIGHT),
}


@pytest.mark.parametrize(("before", "after"), every(2, CHANGES.values(), CHANGES))
def test_a_run_goes_on_in_another_precision(
    before: Precision | None, after: Precision | None, tmp_path: Path
) -> None:
    """Masters are saved, and whoever resumes rounds them for itself."""
    model, loss = build("normed", 2)
    types, data = [before or FLOAT32] * 2 + [after or FLOAT32], batches("normed", 4)

    losses = []
    for precision, done in ((before, 0), (after, 2)):
        trainer = Trainer(
            model, loss, ONE, example=data[0], optimizer=ADAMW, precision=precision, device="cpu"
        )
        assert trainer.resume(tmp_path / "run", missing_ok=True) == done
        losses += [dict(trainer.step(*batch).losses) for batch in data[done:][:2]]
        trainer.save(tmp_path / "run")

    wanted = by_hand(model, loss, types, data, 4)
    assert losses == wanted.losses
    whole = trainer.state_dict()
    assert whole is not None
    for name, master in whole.items():
        assert torch.equal(master, wanted.masters[name]), name
    kinds = {found.type for found in reader_of(tmp_path / "run").index.pieces}
    assert kinds <= {torch.float32, getattr(torch, types[-1].master)}


def test_shards_of_processes_go_on_as_copies(tmp_path: Path) -> None:
    """Four processes with zero=3, then two with copies. The model has a tied parameter."""
    folder, (model, loss) = str(tmp_path / "run"), build("uneven", 2)

    first = run_on(4, train, SHARDS.to_json(), TIGHT, 0, 2, folder)
    last = run_on(2, train, COPIES.to_json(), TIGHT, 2, 1, folder)

    wanted = by_hand(model, loss, [TIGHT] * STEPS, batches("uneven", 4), 4)
    losses = [sum(parts.values()) / 4 for parts in wanted.losses]
    assert first[0][0] + last[0][0] == pytest.approx(losses, rel=1e-6)
    assert last[0][1] is not None
    for name, master in last[0][1].items():
        close(master, wanted.masters[name].to(master.dtype), 1e-6, name)


# Memory and messages


@pytest.mark.parametrize("zero", LEVELS)
def test_bytes_are_those_of_the_closed_form(zero: int) -> None:
    """Two bytes for a parameter, four for its master, eight for the moments; gathers in two bytes,
    reductions in four. Of a shard only its master is held. What a device really holds is what the
    table says."""
    model = nn.Linear(8, 8, bias=False)
    params, n, rows = 64, 2, torch.zeros(4, 8)
    strategy = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=zero)])
    job = Job(model, functional.mse_loss, strategy, Options(precision="bf16", device="cpu"))

    captured, compiled = job.compile(Batch.of((rows, rows)))

    mine = assignment(captured, compiled, 0)
    held = dict(lasting(compiled.dag, mine.plan, 2.0))
    shards = n if zero else 1
    assert held[PARAMETERS] == (0 if zero else 2 * params)
    assert held[MASTERS] == 4 * params // shards
    assert held[OPTIMIZER] == 8 * params // shards
    most = max(one.held.get(BUFFERS, 0) for one in timeline(compiled.dag, mine.plan))
    assert most == (2 * params if zero else 0)
    gathered, reduced = (2 * params // n if zero else 0), 4 * params // n * (1 if zero else 2)
    assert sum(one.sent for one in mine.plan.instructions) == gathered + reduced
    state = DeviceState()
    state.add(
        mine.plan.states, mine.part.contents, mine.part.trainable.__getitem__, job.initial, ADAMW
    )
    (bucket,) = state.buckets.values()
    kept = {one.data_ptr(): one.nbytes for one in (*bucket.tensors, *bucket.parameters)}
    assert sum(kept.values()) == held[PARAMETERS] + held[MASTERS]
    assert sum(one.nbytes for one in bucket.parameters) == held[MASTERS]


@pytest.mark.parametrize("zero", [1, 3])
def test_shards_are_read_by_gathers_only(zero: int) -> None:
    """A shard is in the type of its masters, so nothing else may send or use it: also where stages
    share a parameter."""
    _, _, known = captured("uneven", 2, TIGHT)

    compiled = compile_strategy(known.model, legal("1f1b", 2, dp=2, zero=zero).directives)

    shards = [state.value for state in compiled.plan(0).states if state.rounded_late]
    code = compiled.plan(0).instructions
    readers = {type(one) for one in code if not set(shards).isdisjoint((*one.uses, *one.defines))}
    assert "w:PP0+PP1" in shards and readers == {Gather}


def test_activations_travel_in_the_compute_type() -> None:
    _, _, known = captured("normed", 2, BF16)

    compiled = compile_strategy(known.model, legal("1f1b", 2).directives)

    sent = [one.shapes for one in compiled.plan(0).instructions if isinstance(one, Send)]
    back = [one.shapes for one in compiled.plan(1).instructions if isinstance(one, Send)]
    assert {dtype for shapes in (*sent, *back) for _, dtype in shapes} == {"bfloat16"}
