"""Optimizer state that moves to other memory is the same for everyone who has it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from piper.runtime.gpu.graph_memory import move_state


def stepped() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.arange(6.0))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    return parameter, step(parameter, optimizer)


def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    parameter.grad = torch.cos(parameter.detach())
    optimizer.step()
    return optimizer


def test_state_has_other_memory_and_the_same_values() -> None:
    (kept, usual), (moved, other) = stepped(), stepped()
    averages = other.state[moved]["exp_avg"], other.state[moved]["exp_avg_sq"]
    before = [one.data_ptr() for one in averages]

    move_state([other, None], nullcontext)

    assert averages[0] is other.state[moved]["exp_avg"]
    assert [one.data_ptr() for one in averages][0] != before[0]
    for _ in range(3):
        step(kept, usual)
        step(moved, other)
    assert torch.equal(kept, moved)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_what_something_else_looks_at_stays(name: str) -> None:
    parameter, optimizer = stepped()
    view = optimizer.state[parameter][name].view(2, 3)

    move_state([optimizer], nullcontext)
    step(parameter, optimizer)

    assert torch.equal(view.view(-1), optimizer.state[parameter][name])
