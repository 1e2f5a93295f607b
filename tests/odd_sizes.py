"""Microbatches of any sizes against plain PyTorch on the whole batch. All tests share captures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from replicas import ADAMW, batches, build, part_of, plain
from replicas import compare as must_agree
from runtime.test_replicate import stages_of
from shared_capture import one_model

from piper import Strategy, rehearse

CAPTURES: dict[tuple[str, int], Any] = {}  # by model and stages: a context that captures once
EXACTLY = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)


def must_train_as_plain(name: str, strategy: Strategy, rows: int, **options: Any) -> None:
    """`rows` of all replicas together. The reference runs them as one batch."""
    stages = stages_of(strategy)
    model, loss_fn = build(name, stages)

    with CAPTURES.setdefault((name, stages), one_model())():
        found = rehearse(model, loss_fn, strategy, batches(name, rows), optimizer=ADAMW, **options)

    reference = plain(name, stages, rows, 1, options.get("max_norm"))
    EXACTLY(torch.tensor(found.losses), torch.tensor(reference.loss))
    EXACTLY(torch.tensor(found.grad_norms), torch.tensor(reference.norms))
    parameters = [part_of(key, tensor) for key, tensor in found.parameters.items()]
    must_agree([parameters], reference.parameters, "parameters")
