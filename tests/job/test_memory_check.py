"""Whether a strategy fits in the memory of a device, and what would make it fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import drawn, draws, one_of
from torch import Tensor, nn

from piper import Remat, annotate, rehearse, where
from piper.directives import Directive, Strategy
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.memory.memory_check import worth_showing
from piper.job.memory.memory_limit import GIB, MemoryLimit, optimizer_state
from piper.job.memory.zero_choice import fewest_messages_that_fit
from piper.job.options import Options
from piper.runtime.comm.shared_gpu.shared_rows import group_bytes
from piper.strategies import BUILDERS, one_f_one_b
from piper.view.reports.memory_table import MemoryRow

SGD = partial(torch.optim.SGD, lr=0.1)
WIDTH = 32


class Layers(nn.Module):
    """Layers whose activations are larger than their parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("L"):
                x = x + torch.sin(layer(torch.tanh(layer(torch.sin(x)))))
        return x


@pytest.fixture(scope="module")
def job() -> Job:
    """Its captures are shared."""
    return Job(Layers(), nn.functional.mse_loss, one_f_one_b(2, 4), Options(optimizer=SGD))


@pytest.fixture(scope="module")
def example() -> Batch:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1024, WIDTH, generator=draw, dtype=torch.float64)
    return Batch.of((x, x.roll(1, 0)))


def within(job: Job, gib: float | None, strategy: Strategy | None = None) -> Job:
    options = replace(job.options, memory_gib=gib)
    return replace(job.under(strategy or job.strategy), options=options)


def peak_of(job: Job, example: Batch) -> int:
    _, compiled = job.compile(example)
    return max(MemoryLimit(0, optimizer=0.0).peaks(compiled).values())


def test_a_strategy_that_fits_compiles_as_without_a_limit(job: Job, example: Batch) -> None:
    _, free = job.compile(example)
    _, found = within(job, 1.0).compile(example)

    assert found.plans == free.plans


def test_one_that_does_not_fit_is_refused_with_a_table(job: Job, example: Batch) -> None:
    small = 0.8 * peak_of(job, example) / GIB

    with pytest.raises(InputError) as refused:
        within(job, small).compile(example)

    lines = str(refused.value).splitlines()
    assert lines[0] == "memory: device 0 needs 1.2 MiB, and has 1.0 MiB"
    assert lines[1].split() == ["strategy", "peak", "memory", "fits", "step"]
    assert lines[2].split() == ["as", "it", "is", "1.2", "MiB", "no", "1.00", "x"]
    assert not any(line.strip().startswith('offload="parameters" ') for line in lines)  # as much
    fits = {line.split()[0] for line in lines[3:-1] if " yes " in line}
    assert {'remat="auto"', "remat=True", "microbatches=16"} <= fits
    assert lines[-1].removeprefix("  fix: write ").split()[0] in fits


def test_what_a_strategy_does_already_is_no_row(job: Job, example: Batch) -> None:
    done = within(job, 4e-4, one_f_one_b(2, 4, offload="optimizer", remat=True))

    with pytest.raises(InputError) as refused:
        done.compile(example)

    rows = {line.split()[0] for line in str(refused.value).splitlines()[2:-1]}
    assert not rows & {'offload="optimizer"', "remat=True", 'offload="parameters"'}
    assert {"as", 'offload=["activations",'} <= rows


@pytest.mark.soak
@drawn
def test_what_the_table_advises_fits_when_it_is_followed(job: Job, example: Batch) -> None:
    """Any strategy, and any limit that some change can keep; written as the fix says."""
    kinds = set()
    for seed in range(draws(2, 60)):
        random = Random(seed)
        build = BUILDERS[random.choice(["1f1b", "gpipe", "zb-h1", "zbv"])]
        dp, zero = random.choice([(1, 0), (2, 0), (2, 1), (2, 2)])
        given: dict[str, Any] = {"pp": random.choice([1, 2]), "dp": dp, "microbatches": 4}
        given |= {"zero": zero} if dp > 1 else {}
        adam = replace(job, options=replace(job.options, optimizer=torch.optim.AdamW))
        whole = within(adam, None, build(**given))
        peaks = partial(MemoryLimit(0).peaks)
        most = max(peaks(whole.compile(example)[1]).values())
        limit = random.uniform(0.35, 0.95) * most / GIB

        with pytest.raises(InputError) as refused:
            within(whole, limit).compile(example)
        fix = (
            str(refused.value)
            .rpartition("fix: write ")[2]
            .removesuffix(" in the builder of the strategy")
        )
        if not fix.startswith(("remat", "offload", "zero", "microbatches")):
            continue  # nothing fits
        advised = within(whole, limit, build(**{**given, **eval(f"dict({fix})")}))  # noqa: S307
        _, found = advised.compile(example)

        assert max(peaks(found).values()) <= limit * GIB, (seed, fix)
        kinds.add(fix)
    assert kinds


def test_the_memory_of_a_gpu_is_a_warning(
    job: Job, example: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    tight = replace(job)
    tight.__dict__["memory"] = MemoryLimit(1000, is_given=False)

    with caplog.at_level(logging.WARNING, "piper"):
        tight.compile(example)

    assert caplog.messages[0].startswith("memory: device 0 needs ")
    assert caplog.messages[0].endswith(
        "fix: use more devices or stages, a smaller batch, or a smaller model"
    )


def test_the_figure_of_what_does_not_fit_is_that_of_the_choice_that_needs_least() -> None:
    """As if reducing once needed 5 bytes, and everything else 6: 5 is accepted, 4 is not."""

    def peaks(program: list[Directive]) -> dict[int, int]:
        return {0: 5 if any(getattr(one, "reduce", None) == "once" for one in program) else 6}

    program = one_f_one_b(pp=1, dp=2, zero=3, microbatches=2).directives
    accepted, refused, gpu = (
        fewest_messages_that_fit(
            program, list, SimpleNamespace(peaks=peaks, usable=room, is_given=given), 4
        )
        for room, given in ((5, True), (4, True), (4, False))
    )

    assert peaks(accepted) == peaks(refused) == {0: 5}
    assert gpu == list(program), "a warning; it runs as it was written"


def test_if_nothing_fits_only_what_comes_nearest_is_shown() -> None:
    peaks = {"zero=1": 9, "remat=True": 5, "zero=3": 5, "zero=2": 8, "microbatches=8": 7}
    found = [MemoryRow(name, peak, False, 1.0) for name, peak in peaks.items()]
    rows = [MemoryRow("as it is", 10, False, 1.0), *found]
    one_fits = [*rows, MemoryRow("smaller", 1, True, 2.0)]

    assert [row.change for row in worth_showing(rows)] == [
        "as it is", "remat=True", "microbatches=8", "zero=2",
    ]  # fmt: skip
    assert worth_showing(one_fits) == one_fits


@one_of(2)
@pytest.mark.parametrize("fraction", [0.0, 0.6])
def test_the_choice_of_the_compiler_fits_and_changes_no_bit(
    job: Job, example: Batch, fraction: float
) -> None:
    least, most = (
        peak_of(within(job, None, one_f_one_b(2, 4, remat=remat)), example)
        for remat in (True, False)
    )
    limit = (least + fraction * (most - least)) / GIB
    strategy = one_f_one_b(2, 4, remat="auto")

    _, compiled = within(job, limit, strategy).compile(example)
    again = [region.recomputes for region in compiled.dag.model.regions]
    batches = [example.arguments]
    options = {"optimizer": SGD, "device": "cpu"}
    kept = rehearse(job.model, job.loss_fn, job.strategy, batches, **options)
    found = rehearse(job.model, job.loss_fn, strategy, batches, memory_gib=limit, **options)

    assert any(again)
    assert all(one and one.keep == () for one in again) == (fraction == 0.0)
    assert max(MemoryLimit(0, optimizer=0.0).peaks(compiled).values()) <= limit * GIB
    assert found.losses == kept.losses and found.grad_norms == kept.grad_norms
    assert all(torch.equal(found.parameters[n], kept.parameters[n]) for n in kept.parameters)


def test_nothing_is_recomputed_if_everything_fits(job: Job, example: Batch) -> None:
    _, kept = job.compile(example)
    _, found = within(job, 1.0, one_f_one_b(2, 4, remat="auto")).compile(example)

    assert found.plans == kept.plans
    assert found.program == kept.program


def test_what_was_chosen_is_a_strategy(job: Job, example: Batch) -> None:
    limit = 0.7 * peak_of(job, example) / GIB
    strategy = job.strategy + Remat(where(), memory_gib=limit)

    _, found = within(job, None, strategy).compile(example)
    written = Strategy.from_json(Strategy(found.program).to_json())
    _, same = within(job, None, written).compile(example)

    assert same.plans == found.plans
    assert any(isinstance(one, Remat) and not one.is_auto for one in written)


def test_a_choice_needs_a_limit(job: Job, example: Batch) -> None:
    with pytest.raises(InputError) as refused:
        within(job, None, one_f_one_b(2, 4, remat="auto")).compile(example)

    assert str(refused.value) == (
        'remat: keep="auto" (remat="auto") needs the memory of a device, unknown on a CPU\n'
        "  fix: write Trainer(memory_gib=80), or Remat(where(), memory_gib=80)"
    )


def test_an_amount_of_memory_is_a_number_above_zero() -> None:
    with pytest.raises(InputError) as refused:
        Options(memory_gib=-1)

    assert str(refused.value) == (
        "memory_gib: -1 is not an amount of memory\n"
        "  fix: write GiB of one device, such as 80, or None"
    )


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (torch.optim.AdamW, 2.0),
        (partial(torch.optim.AdamW, amsgrad=True), 3.0),
        (SGD, 0.0),
        (partial(SGD, momentum=0.9), 1.0),
        (lambda named: 1 / 0, 2.0),
    ],
)
def test_the_size_of_an_optimizer(make, size: float) -> None:
    assert optimizer_state(make) == size


def test_processes_that_share_a_gpu_set_memory_aside_for_messages(job: Job, example: Batch) -> None:
    """1F1B: a stage receives one tensor at a time from its neighbour, of 256 rows in float64."""
    _, compiled = job.compile(example)
    alone, shared = (MemoryLimit(0, shared=(links, links)) for links in (False, True))

    more = {
        device: shared.peaks(compiled)[device] - peak
        for device, peak in alone.peaks(compiled).items()
    }

    assert set(more) == {0, 1}
    assert all(size % (256 * WIDTH * 8) == 0 and size > 0 for size in more.values()), more
    assert group_bytes(("ep", (0, 1, 2, 3)), 4096) == 4 * 2 * 2048  # members, slots, twice a share
