"""Every schedule and ZeRO level with random orders of messages, held to plain PyTorch."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
from draws import every
from message_orders import Named
from replicas import ADAMW, batches, build, captured, part_of, plain
from replicas import compare as must_agree
from runtime.test_replicate import legal, stages_of
from shared_capture import using

from piper import Strategy, rehearse
from piper.capture import Captured
from piper.errors import PiperError
from piper.job.compile.compiler import compile_strategy
from piper.strategies import BUILDERS

DRAWS = 6


def with_orders(strategy: Strategy, found: Captured, random: Random) -> Strategy:
    """Two orders with messages on top, which some draw of a few must allow."""
    base = compile_strategy(found.model, strategy)
    for _ in range(DRAWS):
        named = Named(base.dag, random)
        orders = [one for one in (named.drawn(3), named.drawn(4, anywhere=True)) if one]
        try:
            compile_strategy(found.model, [*strategy, *orders])
        except PiperError:
            continue
        if orders:
            return Strategy([*strategy, *orders])
    raise AssertionError("no draw was accepted")


def must_train_as_plain(name: str, strategy: Strategy, replicas: int, seed: int) -> None:
    parts, stages = replicas * strategy.microbatches, stages_of(strategy)
    rows = 2 * parts
    found = captured(name, stages, rows // parts)[2]
    ordered = with_orders(strategy, found, Random(seed))
    model, loss_fn = build(name, stages)

    with using(found):
        result = rehearse(model, loss_fn, ordered, batches(name, rows), optimizer=ADAMW)

    reference = plain(name, stages, rows, parts)
    exactly = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)
    exactly(torch.tensor(result.losses), torch.tensor(reference.loss))
    exactly(torch.tensor(result.grad_norms), torch.tensor(reference.norms))
    parameters = [part_of(key, tensor) for key, tensor in result.parameters.items()]
    must_agree([parameters], reference.parameters, "parameters")


CASES = [(schedule, zero) for schedule in BUILDERS for zero in range(4)]


@pytest.mark.parametrize(("schedule", "zero"), every(17, CASES))
def test_random_orders_of_messages_change_nothing(schedule: str, zero: int) -> None:
    dp = 1 if schedule == "dualpipe" else 2
    strategy = legal(schedule, 2, dp=dp, zero=zero)

    must_train_as_plain("uneven", strategy, 2, seed=zero)


@pytest.mark.parametrize("zero", every(2, (3, 0)))
def test_nor_with_experts(zero: int) -> None:
    strategy = legal("dualpipev", 1, dp=2, ep=2, zero=zero)

    must_train_as_plain("moe spread", strategy, 2, seed=zero)
