"""Fine-tuning: whole stages are frozen, at the start, in the middle or at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product

import pytest
import torch
from draws import every, one_of
from job.test_stages import VOCAB, Layered, loss
from shared_capture import one_model

from piper.directives import Order, Place, Split, Strategy
from piper.errors import DirectiveError
from piper.ir.filters import where
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.numerics import compare
from piper.job.options import Options
from piper.strategies import BUILDERS

FROZEN: dict[str, tuple[str, ...]] = {
    "the first stage": ("embedding.", *(f"layers.{k}." for k in range(5))),
    "all but the norm": ("embedding.", "layers."),
    "a middle stage": tuple(f"layers.{k}." for k in (3, 4, 5, 6)),
    "the last stage": ("norm.", *(f"layers.{k}." for k in (5, 6, 7, 8))),
}
LEVELS = [{}, *({"dp": 2, "zero": zero} for zero in range(4))]
CASES = list(product(FROZEN, BUILDERS, LEVELS))


def tuned(frozen: str) -> Layered:
    torch.manual_seed(0)
    model = Layered().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN[frozen]))
    return model


@pytest.fixture(scope="module")
def job_of() -> Callable[..., AbstractContextManager[tuple[Job, Batch]]]:
    """A job under a strategy. Each frozen model is captured once."""
    known = {frozen: (tuned(frozen), one_model()) for frozen in FROZEN}
    tokens = torch.randint(VOCAB, (8, 3), generator=torch.Generator().manual_seed(1))
    example = Batch.of((tokens, tokens.roll(1, 1)))

    @contextmanager
    def make(frozen: str, strategy: Strategy) -> Iterator[tuple[Job, Batch]]:
        model, once = known[frozen]
        with once():
            yield Job(model, loss, strategy, Options()), example

    return make


@one_of(2)
@pytest.mark.parametrize(("frozen", "name", "level"), every(91, CASES, map(str, CASES)))
def test_frozen_stages_train_as_plain_pytorch(job_of, frozen: str, name: str, level: dict) -> None:
    with job_of(frozen, BUILDERS[name](pp=2, microbatches=4, **level)) as (job, example):
        found = compare(job, example, *job.compile(example), steps=2)

    assert found.agrees, found


def test_an_order_may_name_backwards_that_nothing_needs(job_of) -> None:
    first, last = [where(L=k, PASS="B") for k in (0, 8)]
    strategy = Strategy([Place(where(), [0]), Split("MB", 2), Order([[last], [first]])])

    with job_of("the first stage", strategy) as (job, example):
        _, compiled = job.compile(example)

    assert not compiled.dag.select(first)


def test_a_slip_in_an_order_is_still_found(job_of) -> None:
    strategy = Strategy([Place(where(), [0]), Order([[where(L=0, PASS="BI", MB=0)]])])

    with (
        job_of("the first stage", strategy) as (job, example),
        pytest.raises(DirectiveError, match="no region has the tag MB"),
    ):
        job.compile(example)
