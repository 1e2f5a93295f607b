"""Regions that are recomputed train as regions that keep their activations, in less memory."""

from functools import cache
from pathlib import Path

import pytest
import torch
from draws import every, levels_of
from metered import measure
from pool import run_on
from replicas import (
    ADAMW,
    SGD,
    STEPS,
    Net,
    assert_same,
    batches,
    captured,
    close,
    close_tensors,
    data,
    plain,
    train_all,
)
from runtime.test_replicate import LEVELS, legal, stages_of
from runtime.test_shard import ROUTINGS
from shared_capture import using
from torch import nn
from torch.nn import functional

from piper import Place, Remat, Strategy, Trainer, rehearse, where
from piper.directives.arguments import Kept
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.rehearsal import Rehearsal, rehearsed
from piper.strategies import BUILDERS, one_f_one_b, zb_h1

WHERE = (where(), where(EP="*"), where(EP=None), where(PP=0))
KEEP: tuple[Kept, ...] = ("matmuls", 0.5, ["attention", "matmuls"], 0.2)


def position(schedule: str) -> int:
    return list(BUILDERS).index(schedule)


def run(name: str, strategy: Strategy, replicas: int) -> Rehearsal:
    """All devices as threads of this process."""
    parts = replicas * strategy.microbatches
    model, loss, known = captured(name, stages_of(strategy), 1)
    with using(known):
        return rehearse(model, loss, strategy, batches(name, parts), optimizer=ADAMW)


def assert_plain(found: Rehearsal, name: str, strategy: Strategy, replicas: int) -> None:
    parts = replicas * strategy.microbatches
    wanted = plain(name, stages_of(strategy), parts, parts)
    for step in range(STEPS):
        close(dict(found.parts[step]), wanted.losses[step], f"losses of step {step}")
        close({0: found.grad_norms[step]}, {0: wanted.norms[step]}, "norm")
        close({0: found.losses[step]}, {0: wanted.loss[step]}, "loss")
    for part in wanted.parameters:
        close_tensors(found.parameters[part.name].flatten(), part.values, part.name)


def assert_bitwise(found: Rehearsal, kept: Rehearsal) -> None:
    assert found.losses == kept.losses
    assert found.parts == kept.parts
    assert found.grad_norms == kept.grad_norms
    for name, tensor in kept.parameters.items():
        assert torch.equal(found.parameters[name], tensor), name


@pytest.mark.parametrize(("schedule", "zero"), levels_of(BUILDERS, LEVELS, nth=4))
def test_every_schedule_with_every_level_on_experts(schedule: str, zero: int) -> None:
    """PP=2 x DP=2 (DualPipe: DP=1, twice), EP=2; other regions at each level."""
    strategy = legal(schedule, 2, dp=1 if schedule == "dualpipe" else 2, ep=2, zero=zero)
    name = f"moe {ROUTINGS[zero]}"

    found = run(name, strategy + Remat(WHERE[zero], KEEP[(zero + position(schedule)) % 4]), 2)

    assert_plain(found, name, strategy, 2)
    assert_bitwise(found, run(name, strategy, 2))


@pytest.mark.parametrize(("schedule", "zero"), levels_of(BUILDERS, LEVELS, nth=2, first=1))
def test_every_schedule_with_every_level(schedule: str, zero: int) -> None:
    """Frozen and tied parameters, and sizes that divide by nothing."""
    given = {"dp": 1 if schedule == "dualpipe" else 2, "zero": zero}
    strategy = legal(schedule, 2, **given)

    found = run("uneven", legal(schedule, 2, **given, remat=True), 2)

    assert_plain(found, "uneven", strategy, 2)
    assert_bitwise(found, run("uneven", strategy, 2))


def test_it_may_stand_anywhere() -> None:
    strategy = legal("zbv", 2, dp=2, ep=2, zero=3)
    first, *others = (
        run("moe skewed", Strategy([*strategy.directives[:k], Remat(where(EP="*")), *rest]), 2)
        for k in (0, 3, len(strategy) // 2, len(strategy))
        for rest in [strategy.directives[k:]]
    )

    assert_plain(first, "moe skewed", strategy, 2)
    for other in others:
        assert_bitwise(other, first)


@pytest.mark.parametrize("schedule", every(2, ["zbv", "1f1b"]))
def test_in_processes(schedule: str) -> None:
    """Kernels of recomputed regions are sent to the other processes."""
    strategy = legal(schedule, 2, dp=2, ep=2, zero=3) + Remat(where(), keep=0.5)
    stages, parts = stages_of(strategy), 2 * strategy.microbatches

    runs = run_on(4, train_all, "moe skewed", stages, parts, [strategy.to_json()])

    assert_same([row[0] for row in runs], plain("moe skewed", stages, parts, parts))


# What a repetition could get wrong

MIDDLES = {
    "dropout": lambda: [nn.Dropout(0.4), nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)],
    "buffers": lambda: [nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU()],
}


def net(middle: str) -> Net:
    torch.manual_seed(4)
    return Net(*MIDDLES[middle]())


def of_two_stages(middle: str, strategy: Strategy, compiled: bool = False) -> Rehearsal:
    """BatchNorm before a nonlinear layer: its old statistics are gone when it is recomputed."""
    return rehearsed_once(middle, strategy.to_json(), compiled)


@cache
def rehearsed_once(middle: str, strategy: str, compiled: bool) -> Rehearsal:
    job = job_of(middle, compiled).under(Strategy.from_json(strategy))
    return rehearsed(job, [*map(job.example, data())])


@cache
def job_of(middle: str, compiled: bool) -> Job:
    """All strategies share its capture."""
    options = Options(optimizer=SGD, compiled=compiled, seed=3, device="cpu", graphs=False)
    return Job(net(middle), functional.mse_loss, Strategy([Place(where(), [0])]), options)


@pytest.mark.parametrize(
    ("middle", "builder", "keep", "compiled"),
    [
        pytest.param(*(middle, *kept, compiled), marks=pytest.mark.soak if compiled else ())
        for k, middle in enumerate(MIDDLES)
        for odd, kept in enumerate([(one_f_one_b, ()), (zb_h1, "matmuls")], start=k)
        for compiled in (False, True)
    ],
)
def test_dropout_and_buffers(middle: str, builder: type, keep: Kept, compiled: bool) -> None:
    strategy = builder(pp=2, microbatches=4)

    kept = of_two_stages(middle, strategy, compiled)
    found = of_two_stages(middle, strategy + Remat(where(), keep), compiled)

    assert_bitwise(found, kept)


@pytest.mark.parametrize("builder", [one_f_one_b, zb_h1])
def test_buffers_are_updated_once(builder: type) -> None:
    model, microbatches = net("buffers"), 4
    found = of_two_stages("buffers", builder(pp=2, microbatches=microbatches) + Remat(where()))

    optimizer = SGD(model.parameters())
    for x, y in data():
        optimizer.zero_grad()
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (functional.mse_loss(model(a), b) / microbatches).backward()
        optimizer.step()
    wanted = {name: value for name, value in model.state_dict().items() if "num" not in name}
    assert any("running_mean" in name for name in wanted)
    for name, tensor in wanted.items():
        close_tensors(found.parameters[name].flatten(), tensor.flatten(), name)


def test_a_checkpoint_is_the_same_with_and_without(tmp_path: Path) -> None:
    """Saved by a run that keeps activations, continued by one that recomputes them."""
    options = {"example": data()[0], "device": "cpu", "seed": 3, "optimizer": SGD}
    kept, first, second = (
        Trainer(net("buffers"), functional.mse_loss, strategy, **options)
        for strategy in (None, None, [Place(where(), [0]), Remat(where())])
    )

    wanted = [kept.step(*batch).loss for batch in data()]
    found = [first.step(*batch).loss for batch in data()[:1]]
    first.save(tmp_path / "run")
    assert second.resume(tmp_path / "run") == 1
    found += [second.step(*batch).loss for batch in data()[1:]]

    assert found == wanted
    ours, theirs = second.state_dict(), kept.state_dict()
    assert ours and theirs and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for trainer in (kept, first, second):
        trainer.close()


# Memory


@pytest.mark.parametrize(
    ("schedule", "keep"),
    [
        ("1f1b", "auto"),
        pytest.param("zb-h1", "attention", marks=pytest.mark.soak),
        pytest.param("dualpipe", 0.4, marks=pytest.mark.soak),
    ],
)
def test_memory_falls_and_is_as_computed(schedule: str, keep: Kept) -> None:
    strategy = BUILDERS[schedule](pp=2, microbatches=4)

    kept = run_on(2, measure, stages_of(strategy), 8, strategy.to_json())
    limit = 0.8 * max(peak.total for peak in kept[0][1]) / 2**30 if keep == "auto" else None
    remat = Remat(where(), keep, limit)
    found = run_on(2, measure, stages_of(strategy), 8, (strategy + remat).to_json())

    for device, (seen, _, _) in enumerate(found):
        computed, before = found[0][1][device], kept[0][1][device]
        assert abs(computed.total / seen - 1) < 0.05, (seen, str(computed))
        assert limit is None or computed.total <= limit * 2**30
        if keep == "auto" and before.total <= limit * 2**30:
            continue  # nothing to recompute
        assert computed.total < before.total
        assert seen < kept[device][0]
