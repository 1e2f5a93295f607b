"""Microbatches of different sizes train as plain PyTorch does on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from draws import drawn, draws, every, levels_of
from odd_batches import train
from odd_sizes import CAPTURES, EXACTLY, must_train_as_plain
from plain_loop import plain_losses
from pool import run_on
from replicas import ADAMW, batches, build, part_of, plain
from replicas import compare as must_agree
from runtime.test_replicate import legal
from shared_capture import one_model
from synthetic import chain
from torch import nn

from piper import Place, Remat, Replicate, Split, Strategy, annotate, rehearse, where
from piper.errors import DirectiveError, InputError, PlanError, Refused
from piper.ir.text.parse import parse
from piper.ir.text.text import text
from piper.job.batch.batch import Batch
from piper.job.compile.compiler import compile_strategy
from piper.job.compile.pricing import predict, price
from piper.job.job import Job
from piper.job.model_flops import step_flops
from piper.plan.check.check import check
from piper.plan.instructions import Load, Plan
from piper.strategies import BUILDERS, dualpipe, one_f_one_b


@pytest.mark.parametrize(("schedule", "zero"), levels_of(BUILDERS, range(4), 4))
def test_a_batch_that_their_number_does_not_divide(schedule: str, zero: int) -> None:
    """Two rows in every microbatch but the last, which has one."""
    strategy = legal(schedule, 2, dp=1 if schedule == "dualpipe" else 2, zero=zero)

    must_train_as_plain("uneven", strategy, 2 * (2 * strategy.microbatches - 1), max_norm=0.5)


@pytest.mark.parametrize("zero", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in (1, 2, 3))])
def test_the_same_with_experts(zero: int) -> None:
    strategy = legal("dualpipev", 1, dp=2, ep=2, zero=zero)

    must_train_as_plain("moe spread", strategy, 2 * (2 * strategy.microbatches - 1))


class TwoMeans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        return nn.functional.cross_entropy(output, labels) + output.abs().mean()


def test_means_over_rows_and_over_labels_that_all_count_need_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, data = TwoMeans().double(), (torch.randn(8, 4).double(), torch.arange(8) % 3)
    wanted = model(*data).item()

    with caplog.at_level("WARNING", "piper"):
        found = rehearse(model, None, [Place(where(), [0]), Split("MB", 3)], [data])

    assert not caplog.messages
    assert found.losses == pytest.approx([wanted], rel=1e-12)


OPTIONS = ({"remat": True}, {"offload": "activations"}, {"remat": "matmuls", "zero": 3})


@pytest.mark.parametrize("options", every(2, OPTIONS, map(str, OPTIONS)))
def test_what_directives_say_of_a_region_holds_for_all_sizes(options: dict[str, Any]) -> None:
    strategy = one_f_one_b(pp=2, dp=2, microbatches=2, **options)

    must_train_as_plain("uneven", strategy, 6)


@pytest.mark.parametrize("place", [0, -1])
def test_remat_may_stand_before_or_behind_the_split(place: int) -> None:
    directives = [*one_f_one_b(pp=2, dp=2, microbatches=2)]
    directives.insert(place % (len(directives) + 1), Remat(where()))

    must_train_as_plain("uneven", Strategy(directives), 6)


def test_sizes_that_the_user_gives() -> None:
    strategy = one_f_one_b(pp=2, dp=2, microbatches=3, microbatch_sizes=[1, 2, 1])

    must_train_as_plain("uneven", strategy, 8)
    assert Strategy.from_json(strategy.to_json()) == strategy


HOMES = [([0], [1]), ([0, 2], [1]), ([0, 0, 1], [2]), ([0], [1, 2]), ([0, 1], [0, 1])]


@drawn
@pytest.mark.parametrize("seed", range(draws(1, 60)))
def test_random_sizes_on_random_numbers_of_devices(seed: int) -> None:
    random = Random(seed)
    sizes = [random.randint(1, 3) for _ in range(random.randint(2, 4))]
    homes = random.choice(
        [([0], [1]), ([0, 2], [1]), ([0, 0, 1], [2]), ([0], [1, 2]), ([0, 1],) * 2]
    )
    zero = random.randrange(4)
    program = [
        directive
        for stage, home in enumerate(homes)
        for directive in (
            Place(where(PP=stage), home),
            Replicate(where(PP=stage), list(dict.fromkeys(home)), zero=zero),
        )
    ]
    strategy = Strategy([*program, Split("MB", len(sizes), sizes)])

    must_train_as_plain("uneven", strategy, sum(sizes) * max(map(len, homes)))


class Noisy(nn.Module):
    """Dropout, and a norm over the batch if asked for."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.between = nn.BatchNorm1d(6) if norm else nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP", 0):
            x = self.between(self.first(x))
        with annotate("PP", 1):
            return self.last(torch.tanh(x))


def noisy(norm: bool) -> Noisy:
    torch.manual_seed(1)
    return Noisy(norm).double()


def noisy_batches(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(2)
    rand = partial(torch.randn, generator=draw, dtype=torch.float64)
    return [(rand(rows, 4), rand(rows, 3)) for _ in range(3)]


def test_dropout_masks_are_those_of_the_whole_batch() -> None:
    run = partial(
        rehearse, noisy(norm=False), nn.functional.mse_loss, batches=noisy_batches(7),
        optimizer=ADAMW,
    )  # fmt: skip

    whole = run(strategy=one_f_one_b(pp=2, microbatches=1))
    parts = run(strategy=one_f_one_b(pp=2, microbatches=3, microbatch_sizes=[2, 4, 1]))

    EXACTLY(torch.tensor(parts.losses), torch.tensor(whole.losses))
    for name, tensor in whole.parameters.items():
        EXACTLY(parts.parameters[name], tensor)


def test_buffers_see_microbatches_of_all_sizes_in_order() -> None:
    sizes, model, data = [2, 3, 2], noisy(norm=True), noisy_batches(7)
    reference = noisy(norm=True)
    optimizer = ADAMW(reference.parameters())
    for x, y in data:
        optimizer.zero_grad()
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            (nn.functional.mse_loss(reference(a), b) * len(a) / 7).backward()
        optimizer.step()

    strategy = one_f_one_b(pp=2, microbatches=3, microbatch_sizes=sizes)
    found = rehearse(model, nn.functional.mse_loss, strategy, data, optimizer=ADAMW)

    for name, tensor in reference.state_dict().items():
        EXACTLY(found.parameters[name], tensor)


def ignoring(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=0)


def test_labels_that_count_are_counted_in_microbatches_of_all_sizes() -> None:
    data = [(x, y.argmax(1)) for x, y in noisy_batches(7)]
    assert all(len({*(y[:5] > 0).tolist()}) == 2 for _, y in data)
    model, reference = (noisy(norm=False).eval() for _ in range(2))
    optimizer = ADAMW(reference.parameters())
    losses = plain_losses(optimizer, data, lambda x, y: ignoring(reference(x), y))

    strategy = one_f_one_b(pp=2, microbatches=2, microbatch_sizes=[5, 2])
    found = rehearse(model, ignoring, strategy, data, optimizer=ADAMW)

    EXACTLY(torch.tensor(found.losses), torch.tensor(losses))
    for name, tensor in reference.state_dict().items():
        EXACTLY(found.parameters[name], tensor)


def test_processes_get_the_graphs_of_all_sizes() -> None:
    runs = run_on(2, train, 3)

    reference = plain("uneven", 2, 3, 1)
    for losses, _ in runs:
        EXACTLY(torch.tensor(losses), torch.tensor(reference.loss))
    parameters = [part_of(key, tensor) for key, tensor in runs[0][1].items()]
    must_agree([parameters], reference.parameters, "parameters")


def compiled_job() -> Any:
    model, loss_fn = build("uneven", 2)
    job = Job(model, loss_fn, one_f_one_b(pp=2, microbatches=2))
    with CAPTURES.setdefault(("uneven", 2), one_model())():
        return job.compile(Batch.of(batches("uneven", 3)[0]))[1]


def test_the_check_knows_which_rows_a_microbatch_has() -> None:
    found = compiled_job()

    refused = [refusal(found.dag, plans) for plans in with_other_sizes(found.plans)]

    assert refused and all("it does not load" in one for one in refused)


def with_other_sizes(plans: tuple[Plan, ...]) -> Iterator[list[Plan]]:
    for number, plan in enumerate(plans):
        for k, one in enumerate(plan.instructions):
            if isinstance(one, Load) and one.sizes:
                code = list(plan.instructions)
                code[k] = replace(one, sizes=one.sizes[::-1])
                changed = replace(plan, instructions=tuple(code))
                yield [*plans[:number], changed, *plans[number + 1 :]]


def refusal(dag: Any, plans: list[Plan]) -> str:
    try:
        check(dag, plans)
    except PlanError as error:
        return str(error)
    return "accepted"


def test_the_dag_survives_text() -> None:
    dag = compiled_job().dag

    found = parse(text(dag), dag.model)

    assert found.nodes == dag.nodes and found.values == dag.values


@pytest.mark.parametrize("sizes", [[1], [1, 0], [1, 2.0], "12", 3], ids=str)
def test_sizes_are_a_list_with_a_number_for_each(sizes: Any) -> None:
    with pytest.raises(Refused, match="does not say how many rows each of 2 microbatches has"):
        Split("MB", 2, sizes)


def test_batches_that_cannot_be_cut() -> None:
    few = one_f_one_b(pp=2, microbatches=4)
    odd = one_f_one_b(pp=2, microbatches=2, microbatch_sizes=[2, 1])

    with pytest.raises(InputError, match="it has 3 rows, too few for 4 microbatches"):
        must_train_as_plain("uneven", few, 3)
    with pytest.raises(InputError, match=r"cannot be cut into microbatches of sizes \[2, 1\]"):
        must_train_as_plain("uneven", odd, 4)
    with pytest.raises(InputError, match="6 rows are divided into 2 parts of 4 microbatches each"):
        must_train_as_plain("uneven", dualpipe(pp=2, microbatches=4), 6)


def test_a_model_of_one_size_is_not_split_into_two() -> None:
    with pytest.raises(DirectiveError, match="captured for microbatches of 2 rows, not of 1"):
        compile_strategy(chain(1), [Place(where(), [0]), Split("MB", 2, [2, 1])])


def test_operations_and_samples_of_a_step_are_those_of_all_sizes() -> None:
    """The same rows in equal microbatches have as many."""
    model, loss_fn = build("uneven", 2)
    (batch, *_), found = map(Batch.of, batches("uneven", 6)), []
    with CAPTURES.setdefault(("uneven", 2), one_model())():
        for sizes in ((2, 2, 2), (3, 2, 1)):
            strategy = one_f_one_b(pp=2, microbatches=3, microbatch_sizes=sizes, dp=2)
            job = Job(model, loss_fn, strategy)
            _, compiled = job.compile(batch)
            predicted = predict(compiled, price(compiled))
            found.append((predicted.flops, step_flops(job, batch), predicted.samples))

    (flops, again, samples), other = found
    assert flops == again > 0
    assert samples == 12
    assert other == found[0]
