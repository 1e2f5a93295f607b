"""Replicas with batches of different lengths in one step train as one process with padded ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lengths import (
    NOTHING,
    RATIOS,
    ROWS,
    SGD,
    STEPS,
    Reader,
    label_loss,
    mean_loss,
    padded,
    train_apart,
)
from pool import run_on
from torch import Tensor

from piper import Strategy
from piper.job.compile.division import feeds_of
from piper.job.processes.different_lengths import BatchForm, together
from piper.job.programs.step_programs import outline
from piper.plan.instructions import Exchange, Plan, Reduce, Send
from piper.strategies import BUILDERS

MOST = max(map(max, STEPS))


def plain(loss: str = "labels") -> tuple[list[float], dict[str, Tensor]]:
    """One process with the batches of both replicas. The last loss is that of all batches."""
    model = Reader()
    optimizer, losses = SGD(model.parameters()), []
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        found = whole_loss(model, step, loss)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(found.item())
    with torch.no_grad():
        every = [whole_loss(model, step, loss).item() for step in range(len(STEPS))]
    weights = [weight_of(step, loss) for step in range(len(STEPS))]
    total = sum(a * b for a, b in zip(every, weights, strict=True)) / sum(weights)
    return [*losses, total], model.state_dict()


def weight_of(step: int, loss: str) -> int:
    labels = [padded(step, replica)[1] for replica in (0, 1)]
    return sum(int((one != NOTHING).sum()) if loss == "labels" else one.numel() for one in labels)


def whole_loss(model: Reader, step: int, loss: str) -> Tensor:
    if loss == "labels":
        both = [padded(step, replica, MOST) for replica in (0, 1)]
        tokens, labels = (torch.cat(one) for one in zip(*both, strict=True))
        return label_loss(model(tokens), labels)
    parts = [padded(step, replica) for replica in (0, 1)]
    sizes = [labels.numel() for _, labels in parts]
    losses = [mean_loss(model(tokens), labels) for tokens, labels in parts]
    return sum(a * b for a, b in zip(sizes, losses, strict=True)) / sum(sizes)


def strategy(pp: int = 1, **options: Any) -> Strategy:
    return BUILDERS["1f1b"](pp=pp, dp=2, microbatches=2, **options)


def check(world: int, chosen: Strategy, loss: str = "labels") -> None:
    losses, parameters = plain("labels" if loss in RATIOS else loss)

    results = run_on(world, train_apart, chosen.to_json(), loss)

    for found, _ in results:
        assert [one[0] for one in found] == pytest.approx(losses, rel=1e-12)
        *steps, all_steps = found
        assert [one[1] for one in steps] == [2 * ROWS] * len(STEPS)
        assert [one[2] for one in steps] == [ROWS * (a + b) for a, b in STEPS]
        assert all_steps[1:] == (2 * ROWS * len(STEPS), ROWS * sum(map(sum, STEPS)))
    state = results[0][1]
    for name, wanted in parameters.items():
        torch.testing.assert_close(state[name], wanted, rtol=1e-11, atol=1e-13)


def test_replicas_may_have_different_lengths() -> None:
    check(2, strategy(zero=3))  # gathers depend on lengths at first


@pytest.mark.parametrize("loss", RATIOS)
def test_a_mean_over_a_mean_counts_what_each_replica_averages(loss: str) -> None:
    check(2, strategy(zero=0), loss)


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_under_other_levels_too(zero: int) -> None:
    check(2, strategy(zero=zero))


@pytest.mark.soak
@pytest.mark.parametrize("options", [{"pp": 2}, {"tp": 2}], ids=str)
def test_replicas_of_several_devices_are_refused(options: dict[str, Any]) -> None:
    for found in run_on(4, train_apart, strategy(**options).to_json()):
        assert "messages or their order depend on lengths" in found


@pytest.mark.soak
def test_a_weight_of_the_user_counts() -> None:
    check(2, strategy(), "weighted")


def test_a_mean_that_does_not_say_what_lengths_weigh_is_refused() -> None:
    for found in run_on(2, train_apart, strategy().to_json(), "mean"):
        assert "Piper does not see what the loss divides by" in found
        assert "loss_weight=lambda" in found


def test_messages_between_replicas_must_not_depend_on_lengths() -> None:
    feeds = feeds_of(strategy())

    def drawn(*instructions: Any) -> object:
        return outline(Plan(0, (), instructions), feeds)

    def gradients(size: int, *waits: int) -> Reduce:
        return Reduce("r", "a", "b", (("float32", (0,), size),), (0, 1), False, "dp", waits)

    inside = replace(gradients(4), group=(0,))
    assert drawn(gradients(4)) == drawn(gradients(4)) is not None
    assert drawn(gradients(4)) != drawn(gradients(5))
    assert drawn(gradients(4), gradients(5)) != drawn(gradients(5), gradients(4))
    assert drawn(gradients(4), gradients(4, 0)) == drawn(gradients(4), gradients(4))
    assert drawn(gradients(4), inside) is None
    tokens = Exchange("e", "counted", ("x", "n"), ("y", "m", "r"), (), (0, 1), "ep")
    assert drawn(tokens) is None
    assert drawn(Send("s", "x", (), 0, "pp")) is None


def form(feed: int, *shape: int, flags: tuple[bool, ...] = (True,)) -> BatchForm:
    return BatchForm(feed, ((shape, torch.int64), "spec"), flags, shape[0], shape[0] * shape[1])


def test_only_lengths_may_differ() -> None:
    found = together([form(0, 4, 5), form(1, 4, 7), form(0, 4, 5)])

    assert found is not None and found.sizes == (8, 48)
    assert together([form(0, 4, 5), form(1, 8, 5)]) is None  # rows
    assert together([form(0, 4, 5), form(0, 4, 7)]) is None  # of one replica
    assert together([form(0, 4, 5), form(1, 4, 7, flags=(False,))]) is None
    assert together([form(0, 4, 5), form(1, 4, 5, 2)]) is None
