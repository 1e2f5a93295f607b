"""Replicas with different numbers of rows train as one process does on all rows together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from draws import drawn, draws, every, levels_of
from job.test_microbatch_sizes import ignoring, noisy, noisy_batches
from odd_sizes import CAPTURES, EXACTLY, must_train_as_plain
from plain_loop import plain_losses
from pool import run_on
from replicas import ADAMW, batches, build, part_of, plain
from replicas import compare as must_agree
from runtime.test_replicate import legal
from shared_capture import one_model
from torch import nn
from unequal_batches import SIZES, train

from piper import Place, Replicate, Split, Strategy, rehearse, where
from piper.errors import InputError, PlanError, Refused
from piper.job.batch.batch import Batch
from piper.job.compile.compiler import Compiled
from piper.job.compile.pricing import predict, price
from piper.job.job import Job
from piper.job.model_flops import step_flops
from piper.job.numerics.compare import compare
from piper.plan.analyse.memory import peak
from piper.plan.check.check import check
from piper.strategies import BUILDERS, one_f_one_b


@pytest.mark.parametrize(("schedule", "zero"), levels_of(BUILDERS, range(4), 5, 1))
def test_every_schedule_and_level(schedule: str, zero: int) -> None:
    """Microbatches of one and two rows on one replica, of two rows on the other."""
    count = legal(schedule, 2).microbatches
    sizes = [count + 1, 2 * count]
    strategy = legal(schedule, 2, dp=2, zero=zero, replica_sizes=sizes)
    parts = 2 if schedule == "dualpipe" else 1  # replicas that share a batch

    must_train_as_plain("uneven", strategy, sum(sizes) * parts, max_norm=0.5)


OPTIONS: list[dict[str, Any]] = [
    {"remat": True, "microbatch_sizes": [2, 1]},
    {"offload": "activations"},
    {"remat": "matmuls", "zero": 3, "mesh": "pp,dp"},
    {"offload": ["parameters", "optimizer"], "zero": 2},
    {"tp": 2},
]


@pytest.mark.parametrize("options", every(3, OPTIONS, map(str, OPTIONS)))
def test_options_of_builders(options: dict[str, Any]) -> None:
    strategy = one_f_one_b(pp=2, dp=2, microbatches=2, replica_sizes=[3, 6], **options)

    must_train_as_plain("uneven", strategy, 9)


@pytest.mark.soak
@pytest.mark.parametrize("zero", range(4))
def test_experts_on_replicas_with_different_rows(zero: int) -> None:
    strategy = legal("dualpipev", 1, dp=2, ep=2, zero=zero)
    count = strategy.microbatches
    strategy = legal("dualpipev", 1, dp=2, ep=2, zero=zero, replica_sizes=[count, 2 * count])

    must_train_as_plain("moe spread", strategy, 3 * count)


@drawn
@pytest.mark.parametrize("seed", range(draws(1, 60)))
def test_random_rows_on_random_devices(seed: int) -> None:
    """Also devices with several replicas, and replicas of very different sizes."""
    random = Random(seed)
    homes = random.choice(
        [
            ([0, 1, 2], [3, 4, 5]), ([0, 2], [1, 3]), ([0, 1],) * 2, ([2, 1, 0],) * 2,
            ([0, 1, 2, 3], [4, 5]), ([0, 0, 1, 2, 2, 3],) * 2,
        ]
    )  # fmt: skip
    replicas = {6: 2, 4: 2}.get(max(map(len, homes)), len(homes[0]))
    parts = max(map(len, homes)) // replicas
    count = random.randint(1, 3)
    sizes = [random.randint(count, 7) for _ in range(replicas)]
    zero = random.randrange(4)
    program = [
        directive
        for stage, home in enumerate(homes)
        for directive in (
            Place(where(PP=stage), home),
            Replicate(where(PP=stage), list(dict.fromkeys(home)), zero=zero),
        )
    ]
    strategy = Strategy([*program, Split("MB", count, None, sizes)])

    must_train_as_plain("uneven", strategy, sum(sizes) * parts)


def test_dropout_masks_are_those_of_the_whole_batch() -> None:
    run = partial(
        rehearse, noisy(norm=False), nn.functional.mse_loss, batches=noisy_batches(7),
        optimizer=ADAMW,
    )  # fmt: skip

    whole = run(strategy=one_f_one_b(pp=2, microbatches=1))
    parts = run(strategy=one_f_one_b(pp=2, microbatches=2, dp=2, replica_sizes=[4, 3]))

    EXACTLY(torch.tensor(parts.losses), torch.tensor(whole.losses))
    for name, tensor in whole.parameters.items():
        EXACTLY(parts.parameters[name], tensor)


@pytest.mark.soak
def test_labels_that_count_are_counted_on_all_replicas() -> None:
    data = [(x, y.argmax(1)) for x, y in noisy_batches(7)]
    model, reference = (noisy(norm=False).eval() for _ in range(2))
    optimizer = ADAMW(reference.parameters())
    losses = plain_losses(optimizer, data, lambda x, y: ignoring(reference(x), y))

    strategy = one_f_one_b(pp=2, microbatches=2, dp=2, replica_sizes=[5, 2])
    found = rehearse(model, ignoring, strategy, data, optimizer=ADAMW)

    EXACTLY(torch.tensor(found.losses), torch.tensor(losses))
    for name, tensor in reference.state_dict().items():
        EXACTLY(found.parameters[name], tensor)


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_processes_train_evaluate_predict_and_resume(pp: int, tmp_path: Path) -> None:
    runs = run_on(2 * pp, train, pp, str(tmp_path))

    reference, (model, loss_fn) = plain("uneven", 2, 6, 1), build("uneven", 2)
    parameters = [part_of(key, tensor) for key, tensor in runs[0]["whole"].items()]
    must_agree([parameters], reference.parameters, "parameters")
    model.load_state_dict(runs[0]["whole"])
    data = batches("uneven", 6)
    losses = [loss_fn(model(x), y).item() for x, y in data]
    EXACTLY(runs[0]["outputs"], model(data[0][0]))
    for run in runs:
        EXACTLY(torch.tensor(run["losses"]), torch.tensor(reference.loss))
        EXACTLY(torch.tensor(run["resumed"]), torch.tensor(reference.loss[2:]))
        EXACTLY(torch.tensor(run["evaluated"]), torch.tensor(losses).mean())
        assert (run["step samples"], run["samples"]) == (6, 18)
        few, other = run["wrong"]
        size = SIZES[run["replica"]]
        assert f"it has 1 row, and replica {run['replica']} is to have {size}" in few
        assert "the first replica would have [8, 7] by the batch of device" in other


def compiled(job: Job, batch: Batch, **how: Any) -> Compiled:
    with CAPTURES.setdefault(("uneven", 2), one_model())():
        return job.compile(batch, **how)[1]


def job_of(**options: Any) -> Job:
    model, loss_fn = build("uneven", 2)
    return Job(model, loss_fn, one_f_one_b(pp=2, dp=2, microbatches=2, **options))


def test_memory_time_and_samples_are_those_of_each_replica() -> None:
    small, large = Batch.of(batches("uneven", 2)[0]), Batch.of(batches("uneven", 6)[0])
    job = job_of(replica_sizes=[1, 3])
    mixed = compiled(job, small, by_role=True)
    few = compiled(job_of(), small)
    many = compiled(job_of(), large)

    peaks = {plan.device: peak(mixed.dag, plan).total for plan in mixed.plans}
    assert sorted(peaks) == [0, 1, 2, 3]
    assert [peaks[k] for k in (0, 1)] == [peak(few.dag, few.plans[k]).total for k in (0, 1)]
    assert [peaks[k] for k in (2, 3)] == [peak(many.dag, many.plans[k]).total for k in (2, 3)]
    predictions = [predict(one, price(one)) for one in (few, mixed, many)]
    times = [one.report.seconds for one in predictions]
    assert times[0] < times[1] <= times[2]
    assert [one.samples for one in predictions] == [4, 8, 12]
    assert predictions[1].flops == pytest.approx(step_flops(job, small))


def test_one_plan_serves_all_replicas_of_a_size() -> None:
    model, loss_fn = build("uneven", 2)
    strategy = one_f_one_b(pp=2, dp=6, microbatches=2, replica_sizes=[2, 1, 2, 1, 2, 2])
    job = Job(model, loss_fn, strategy)
    batch = Batch.of(batches("uneven", 4)[0])

    by_role = compiled(job, batch, by_role=True)
    whole = compiled(job, batch)

    assert [plan.device for plan in by_role.plans] == [0, 1, 2, 3, 8, 9]
    assert by_role.device_plans == whole.plans
    check(whole.dag, whole.plans)


def test_the_check_knows_how_many_rows_a_replica_has() -> None:
    """Plans of replicas of equal sizes do not pass for those of different ones."""
    mixed = compiled(job_of(replica_sizes=[1, 3]), Batch.of(batches("uneven", 2)[0]))
    equal = compiled(job_of(), Batch.of(batches("uneven", 2)[0]))
    other = compiled(job_of(replica_sizes=[1, 2]), Batch.of(batches("uneven", 2)[0]))

    check(mixed.dag, mixed.plans)
    for plans in (equal.plans, other.plans):
        with pytest.raises(PlanError):
            check(mixed.dag, plans)


def test_piper_check_compares_them_with_plain_pytorch() -> None:
    job, example = job_of(replica_sizes=[3, 4]), Batch.of(batches("uneven", 3)[0])

    found = compare(job, example, *job.compile(example))

    assert found.agrees and max(step.difference for step in found.steps) < 1e-12


def test_a_strategy_with_them_survives_json() -> None:
    strategy = one_f_one_b(pp=2, dp=2, microbatches=2, replica_sizes=[3, 5])

    assert Strategy.from_json(strategy.to_json()) == strategy
    assert "replica_sizes" not in one_f_one_b(pp=2, dp=2, microbatches=2).to_json()


@pytest.mark.parametrize("sizes", [[], [1, 0], [1, 2.0], "12", 3], ids=str)
def test_sizes_are_a_list_of_numbers(sizes: Any) -> None:
    with pytest.raises(Refused, match="does not say how many rows each replica has"):
        Split("MB", 2, None, sizes)


def test_what_does_not_fit_is_not_supported() -> None:
    wrong = partial(must_train_as_plain, "uneven")
    sizes = [3, 5]

    with pytest.raises(InputError, match="it has 2 numbers for 3 replicas"):
        wrong(one_f_one_b(pp=2, dp=3, microbatches=1, replica_sizes=sizes), 8)
    with pytest.raises(InputError, match=r"9 rows, which replica_sizes=\[3, 5\] does not divide"):
        wrong(one_f_one_b(pp=2, dp=2, microbatches=1, replica_sizes=sizes), 9)
    with pytest.raises(InputError, match="batch of replica 1: it has 2 rows, too few for 4"):
        wrong(one_f_one_b(pp=2, dp=2, microbatches=4, replica_sizes=[2, 1]), 6)
