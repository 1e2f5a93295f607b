"""A model that runs once may not run again: trials are then left out, and training goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn

from piper import Place, Split, rehearse, where
from piper.capture.trace.trials.trial_run import Trial, TrialRuns


def loss(out: Tensor, y: Tensor) -> Tensor:
    """Only trials show that it is a mean."""
    return torch.stack([(a - b).square().mean() for a, b in zip(out, y, strict=True)]).mean()


class Meeting(nn.Module):
    """A trial that sees that rows meet runs once more, to find the line."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.stack([one.abs().max() for one in x]).max()


@one_of(24)
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Meeting()], ids=["dropout", "meeting"])
@pytest.mark.parametrize("error", [StopIteration(), ValueError("used up"), KeyError("more")])
@pytest.mark.parametrize("runs", [1, 2, 3, 4, 6, 9])
def test_an_error_of_a_later_run_is_no_crash(
    layer: nn.Module, error: Exception, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    run = TrialRuns.run

    def used_up(self: TrialRuns, *given: Any, **named: Any) -> Trial:
        seen.append(len(seen))
        if len(seen) >= runs:
            raise error
        return run(self, *given, **named)

    monkeypatch.setattr(TrialRuns, "run", used_up)
    x = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3))
    sgd = partial(torch.optim.SGD, lr=0.1)
    found = rehearse(model, loss, [Place(where(), [0]), Split("MB", 2)], [(x, x)], optimizer=sgd)

    assert len(seen) >= runs
    assert len(found.losses) == 1
