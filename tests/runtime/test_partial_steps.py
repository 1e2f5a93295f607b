"""An optimizer that steps on some parameters after others gives the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import every
from torch import nn

from piper.runtime.optimizers.known_optimizers import ELEMENTWISE
from piper.runtime.state import partial_steps
from piper.runtime.state.partial_steps import makes_copies, parts, step

SIZES = (5, 3, 8, 1, 7, 2)
FOREACH = {"lr": 0.01, "foreach": True}


def made(kind: str, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size)) for size in SIZES]
    groups = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.1}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **{**FOREACH, **options})
    return optimizer


def values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", every(3, ELEMENTWISE))
def test_parts_give_the_bits_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_steps, "LEAST", 16)
    runs = [made(kind), made(kind)]
    schedules = [torch.optim.lr_scheduler.LinearLR(one, total_iters=3) for one in runs]

    for turn in range(3):
        for optimizer, schedule, in_parts in zip(runs, schedules, (False, True), strict=True):
            for k, value in enumerate(values(optimizer)):
                draw = torch.Generator().manual_seed(10 * turn + k)
                parameter = [p for g in optimizer.param_groups for p in g["params"]][k]
                parameter.grad = torch.randn(value.shape, generator=draw)
            step(SimpleNamespace(optimizer=optimizer, in_parts=in_parts))
            schedule.step()

    for whole, cut in zip(*map(values, runs), strict=True):
        assert torch.equal(whole, cut)
    assert len(runs[1].state) == len(runs[0].state)


def test_parts_are_a_quarter_or_what_is_worth_a_call() -> None:
    groups = made("AdamW").param_groups

    quarter = [[p.numel() for p in part["params"]] for part in parts(groups, least=0)]
    large = [[p.numel() for p in part["params"]] for part in parts(groups, least=36)]

    assert quarter == [[5], [3], [8], [1], [7], [2]]
    assert large == [[5, 3], [8, 1], [7, 2]]


def test_only_foreach_makes_copies() -> None:
    assert makes_copies(made("AdamW"))
    assert not makes_copies(made("AdamW", foreach=None)), "on a CPU"
    assert not makes_copies(made("AdamW", foreach=None, fused=True))
    own = made("AdamW")
    own.step = lambda: None  # type: ignore[method-assign, assignment]
    assert not makes_copies(own)
