"""Labels that a loss changes in place, as tutorials write it: as in plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.job.loss import trial_size
from piper.strategies import gpipe, one_f_one_b

PAD = 3


class Net(nn.Module):
    """With a loss of its own, if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)).double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        out: Tensor = self.layers(x)
        return out if labels is None else padded(out, labels)


def padded(o: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    y[y == PAD] = -100
    return F.cross_entropy(o.flatten(0, 1), y.flatten())


def next_tokens(o: Tensor, y: Tensor) -> Tensor:
    y = y.roll(-1, 1)
    y[:, -1] = -100
    return padded(o, y)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    made = [torch.randint(8, (2, 8, 5), generator=draw) for _ in range(3)]
    for one in made:
        one[1, :3] = torch.where(one[1, :3] > 2, PAD, one[1, :3])  # not as many in each microbatch
    return [(one[0], one[1]) for one in made]


@one_of(4)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("loss", [None, padded, next_tokens])
@pytest.mark.parametrize(
    "strategy", [gpipe(1, 4), gpipe(1, 2, dp=2, zero=2), one_f_one_b(2, 4)], ids=["1", "dp", "pp"]
)
def test_as_plain_training(
    loss: Callable[..., Tensor] | None, strategy: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(trial_size, "WHOLE", 0.0)
        monkeypatch.setattr(trial_size, "MOST", 0.0)
    model, wanted = Net(), []
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for x, y in batches():
        one = (loss or padded)(plain(x), y)
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(one.item())
    found = rehearse(
        model, loss, strategy, batches(), optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.05)
    )
    assert found.losses == pytest.approx(wanted, rel=1e-12)
