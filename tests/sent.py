"""Jobs for workers: what the first process sends to the others, and what it tells them instead."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from replicas import ADAMW, Net, batches, data, known
from shared_capture import using
from torch import Tensor, nn
from torch.nn import functional

from piper.directives import Place, Split, Strategy
from piper.errors import InputError
from piper.ir.filters import where
from piper.job.compile import shipping
from piper.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
COMPILING = ("job.capture", "job.compile_strategy", "programs.programs.assignment")
TWO = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("this device must not do that")


def train(rank: int) -> tuple[list[float], list[str], list[str], list[str]]:
    """Losses; and what this device knows: its regions, its buckets, its kernels."""
    with ExitStack() as stack:
        for name in COMPILING if rank else ():
            stack.enter_context(patch(f"piper.job.{name}", forbidden))
        trainer = Trainer(
            Net(nn.Dropout(0.5)), functional.mse_loss, [*TWO, Split("MB", 2)], optimizer=SGD,
            example=data()[0],
        )  # fmt: skip
        losses = [trainer.step(*batch).loss for batch in data()]
        losses += [trainer.step(x[:4], y[:4]).loss for x, y in data()]
    (first, _) = trainer._programs.assigned.values()
    there = [f"{code} {phase}" for code, phase, _ in trainer._programs.shipping.kernels.made]
    trainer.close()
    return losses, sorted(first.codes), sorted(first.part.contents), there


class Failing(Net):
    """Fails in its own words while it is captured."""

    class Odd(Exception):
        """An error that only this script knows."""

    def forward(self, x: Tensor) -> Tensor:
        raise Failing.Odd("not today")


def refused(rank: int, case: str) -> tuple[str, str]:
    """The error that a device ends with."""
    alone = [Place(where(), [0])]
    strategy = {"unplaced": TWO[:1], "world": alone, "no device": []}.get(case, TWO)
    fails = case in ("odd", "unplaced", "world")  # too many processes are seen before the capture
    model = Failing() if fails else Net()
    example = data()[0] if case != "uneven" else data(rows=1)[0]
    try:
        Trainer(model, functional.mse_loss, [*strategy, Split("MB", 2)], example=example)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was said"


def tune(rank: int, text: str) -> list[int]:
    """How many kernels went from the first device to the other, each time."""
    counts: list[int] = []

    def relay(text: str, ranks: list[int]) -> str:
        found = original(text, ranks)
        counts.append(len(json.loads(found)) - 1)
        return found

    original = shipping.relay_text
    mine = [tuple(t.chunk(2)[rank] for t in batch) for batch in batches("moe spread", 4)]
    model, loss, found = known(rank, "moe spread", 1, 1)
    with patch("piper.job.compile.shipping.relay_text", relay):
        with using(found):
            trainer = Trainer(
                model, loss, Strategy.from_json(text), optimizer=ADAMW, example=mine[0]
            )
        trainer.tune(*mine[0])
        trainer.step(*mine[1])
    trainer.close()
    return counts


def after_a_failure(rank: int) -> tuple[float, str, list[float]]:
    """A loss, what the step after one that failed is told, and losses of a new Trainer."""
    trainer = Trainer(Net(), functional.mse_loss, TWO, optimizer=SGD, example=data()[0])
    first = trainer.step(*data()[0]).loss
    with patch.object(trainer._recording, "step", forbidden), suppress(AssertionError):
        trainer.step(*data()[1])
    try:
        trainer.step(*data()[1])
        told = ""
    except InputError as error:
        told = str(error)
    trainer.close()
    again = Trainer(Net(), functional.mse_loss, TWO, optimizer=SGD, example=data()[0])
    losses = [again.step(*batch).loss for batch in data()]
    again.close()
    return first, told, losses
