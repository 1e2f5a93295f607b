"""A job is what to train and how to compile it: it needs no Trainer, and no other process."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from piper import Place, Replicate, Split, Strategy, where
from piper.capture import capture
from piper.costs import Costs
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.options import Options

X = torch.randn(8, 3)
BATCH = Batch.of((X, X))
PARTS = Strategy([Place(where(), (0,)), Split("MB", 2)])
REPLICAS = Strategy([Place(where(), (0, 1)), Replicate(where(), (0, 1)), Split("MB", 2)])


def job(strategy: Strategy = PARTS, **options: Any) -> Job:
    return Job(nn.Linear(3, 3), functional.mse_loss, strategy, Options(**options))


def test_a_job_says_in_how_many_parts_a_batch_is_cut() -> None:
    found = job(REPLICAS)

    assert (found.microbatches, found.replicas, found.all_microbatches) == (2, 2, 4)


def test_a_model_is_captured_once_for_all_strategies_with_these_microbatches() -> None:
    first = job(device="cpu")

    with patch("piper.job.job.capture", side_effect=capture) as made:
        first.compile(BATCH)
        _, compiled = first.under(REPLICAS).compile(BATCH)
        first.compile(BATCH, Costs())

    assert made.call_count == 1
    assert len(compiled.plans) == 2


def test_a_model_in_another_mode_is_captured_again() -> None:
    found = job()

    first = found.capture(BATCH)
    found.model.eval()

    assert found.capture(BATCH) is not first
    found.model.train()
    assert found.capture(BATCH) is first


def test_what_a_program_is_given_counts_microbatches_of_all_replicas() -> None:
    found = job(REPLICAS, seed=2, max_norm=0.5)

    inputs = found.inputs(BATCH, (0.25, 0.25), step=3, feed=1)

    assert inputs.first == 2 and inputs.max_norm == 0.5 and inputs.seed == 2 * 1_000_003 + 3
    assert [tensor.shape for tensor in inputs.inputs] == [X.shape, X.shape]


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        job().strategy = REPLICAS  # type: ignore[misc]
