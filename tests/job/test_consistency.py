"""Processes that were given different things are told so, before they train apart."""

from pathlib import Path

import pytest
import torch
from parity import TABLES, call_alone, compare_notes, compare_options, drift
from pool import run_on

from piper.job.processes.consistency import fingerprint

FIX = "  fix: let every process build the same model, strategy and example, with the same options"


def test_processes_that_agree_go_on() -> None:
    assert run_on(2, compare_notes) == ["fine", "fine"]


def test_other_initial_weights_are_refused() -> None:
    message = (
        "model: 0.weight starts with different values on device 1 than on device 0\n"
        "  fix: call torch.manual_seed(...) before the model is built, or load a checkpoint"
    )

    assert run_on(2, compare_notes, "seed") == [message, message]


@pytest.mark.parametrize("case", TABLES)
def test_one_other_row_of_a_large_table_is_refused(case: str) -> None:
    what = "2.values starts with different values on device 1 than on device 0"

    for found in run_on(2, compare_notes, case):
        assert what in found


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("parts", "strategy: device 1 was given a different one than device 0"),
        ("rows", "example: device 1 was given a different one than device 0"),
        ("dropout", "model: device 1 was given a different one than device 0"),
        ("model", "model: device 1 was given a different one than device 0"),
        ("max_norm", "max_norm: device 1 was given a different one than device 0: 2.0, not 1.0"),
    ],
)
def test_another_job_is_refused_before_it_is_compiled(case: str, what: str) -> None:
    assert run_on(2, compare_notes, case) == [f"{what}\n{FIX}"] * 2


def test_other_options_and_other_code_are_refused() -> None:
    here, there = run_on(2, compare_options)

    apart = "device 1 was given a different one than device 0"
    assert here == there
    assert here == {
        "lr": f"optimizer['lr']: {apart}: 0.2, not 0.1",
        "class": f"optimizer: {apart}: torch.optim.adam.Adam, not torch.optim.sgd.SGD",
        "betas": f"optimizer['betas'][1]: {apart}: 0.95, not 0.99",
        "lambda": f"optimizer: {apart}",
        "scheduler": f"lr_scheduler['step_size']: {apart}: 2, not 1",
        "no scheduler": f"lr_scheduler: {apart}: None, not torch.optim.lr_scheduler.StepLR",
        "loss": f"loss_fn: {apart}",
        "loss of torch": f"loss_fn: {apart}",
        "closure": f"by in scaled.<locals>.<lambda>: {apart}: 2.0, not 1.0",
        "loss module": f"loss_fn.delta: {apart}: 2.0, not 1.0",
        "weight": f"loss_weight: {apart}",
    }


@pytest.mark.parametrize("frozen", [False, True])
def test_replicas_that_drift_apart_are_found(frozen: bool, tmp_path: Path) -> None:
    message = (
        "1.weight: after step 4, it differs between device 0 and device 1, which are replicas\n"
        "  fix: give all processes the same options and versions of PyTorch, and test the hardware "
        "of both devices; then resume from the last checkpoint"
    )

    assert run_on(2, drift, 0, str(tmp_path / "run"), frozen) == [("fine", message)] * 2


def test_shards_are_no_replicas(tmp_path: Path) -> None:
    assert run_on(2, drift, 3, str(tmp_path / "run")) == [("fine", "fine")] * 2


@pytest.mark.parametrize("call", ["save", "resume", "state_dict", "record", "tune"])
def test_what_all_must_call_is_not_called_by_one(call: str, tmp_path: Path) -> None:
    message = (
        f"trainer: device 1 is in trainer.step(...), device 0 in {call}(...)\n"
        "  fix: let every process call both, in the same order: no `if trainer.rank == 0:` around "
        "them"
    )

    assert run_on(2, call_alone, call, str(tmp_path / "run")) == [message] * 2


@pytest.mark.parametrize("layout", ["rows", "columns", "channels last"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_other_data_has_another_fingerprint(layout: str, kind: torch.dtype) -> None:
    def batch(seed: int) -> list[torch.Tensor]:
        made = torch.rand(4, 6, 8, 10, generator=torch.Generator().manual_seed(seed))
        made = (made * 100).to(kind) if kind != torch.bool else made > 0.5
        if layout == "channels last":
            return [made.contiguous(memory_format=torch.channels_last)]
        return [made.transpose(0, 3) if layout == "columns" else made]

    one_other = batch(0)
    one_other[0][1, 2, 3, 3] = not one_other[0][1, 2, 3, 3]

    assert fingerprint(one_other) != fingerprint(batch(0))
    assert fingerprint(batch(0)) == fingerprint(batch(0))
    assert fingerprint(batch(0)) != fingerprint(batch(1))
    assert fingerprint(batch(0) + batch(1)) != fingerprint(batch(1) + batch(0))


def test_empty_tensors_and_numbers_have_fingerprints() -> None:
    assert fingerprint([torch.empty(0, 3)]) == fingerprint([])
    assert fingerprint([torch.tensor(3)]) != fingerprint([torch.tensor(4)])
