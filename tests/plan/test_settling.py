"""A device does not hold whole gradients through the forwards of the next microbatch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from plain_loop import plain_losses
from shared_capture import one_model
from synthetic import chain
from torch import nn
from torch.nn import functional

from piper import annotate
from piper.directives import Place, Replicate, Split, Strategy
from piper.ir.filters import where
from piper.job.compile.compiler import compile_strategy
from piper.job.programs.rehearsal import rehearse
from piper.names import B
from piper.plan.analyse.memory import MOVING, peak, timeline
from piper.plan.instructions import Run
from piper.plan.lower import settling

REGIONS = settling.MANY
KNOWN = one_model()


class Net(nn.Module):
    """So many regions, each with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(REGIONS)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = x + torch.tanh(layer(x))
        return x


def replicated(zero: int) -> Strategy:
    """Four regions on two replicas, three microbatches, whose gradients are reduced one by one."""
    devices = [0, 1]
    return Strategy([
        Place(where(), devices),
        Replicate(where(), devices, zero=zero, reduce="each"),
        Split("MB", 3),
    ])  # fmt: skip


def first_backwards(plan: Any) -> set[int]:
    last = f"PP{REGIONS - 1}"
    runs = ((k, one) for k, one in enumerate(plan.instructions) if isinstance(one, Run))
    return {k for k, one in runs if one.phase is B and one.region == last}


@pytest.mark.parametrize("zero", [2, 3])
def test_nothing_is_in_flight_where_most_is_held(zero: int, monkeypatch: Any) -> None:
    found = []
    for many in (REGIONS, REGIONS + 1):
        monkeypatch.setattr(settling, "MANY", many)
        compiled = compile_strategy(chain(REGIONS), replicated(zero).directives)
        plan = compiled.plan(0)
        moments = {one.at: one.held for one in timeline(compiled.dag, plan, staging=0)}
        moving = [moments[k].get(MOVING, 0) for k in sorted(first_backwards(plan))]
        found.append((moving, peak(compiled.dag, plan, staging=0).total))

    (none, less), (whole, more) = found
    assert none == [0, 0, 0] and whole[0] == 0 and whole[1] == whole[2] > 0
    assert less < more


@one_of(2)
@pytest.mark.parametrize("zero", [2, 3])
def test_the_numbers_are_those_of_plain_training(zero: int) -> None:
    model = Net()
    batches = [(one, one.flip(0)) for one in torch.randn(2, 6, 8).double()]
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    plain = copy.deepcopy(model)
    losses = plain_losses(
        adamw(plain.parameters()), batches, lambda x, y: functional.mse_loss(plain(x), y)
    )

    with KNOWN():
        found = rehearse(model, functional.mse_loss, replicated(zero), batches, optimizer=adamw)

    assert found.losses == pytest.approx(losses, rel=1e-12)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-9, atol=1e-12)
