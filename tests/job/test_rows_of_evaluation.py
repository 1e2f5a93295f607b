"""Rows that meet in eval mode only: each microbatch of an evaluation has its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, where

SGD = partial(torch.optim.SGD, lr=0.1)


class Centred(nn.Module):
    """Its outputs are compared with those of the other rows, always or in eval mode."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.always = nn.Linear(4, 3).double(), always

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found if self.training and not self.always else found - found.mean(0)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=draw).double(), torch.randint(3, (6,), generator=draw)


def made(always: bool, parts: int) -> Trainer:
    strategy = [Place(where(), [0]), Split("MB", parts)]
    given: dict[str, Any] = {"example": batch(), "optimizer": SGD, "device": "cpu"}
    return Trainer(Centred(always), F.cross_entropy, strategy, **given)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_they_are_warned_of(call: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y = batch()
    with made(always=False, parts=3) as trainer:
        trainer.step(x, y)
        assert "meet" not in caplog.text
        _ = trainer.evaluate([(x, y)]) if call == "evaluate" else trainer.predict(x)

    assert "in evaluation, rows of the batch meet at test_rows_of_evaluation.py:" in caplog.text


def test_one_microbatch_is_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    x, y = batch()
    with made(always=False, parts=1) as trainer:
        found, loss = trainer.predict(x), trainer.evaluate([(x, y)]).loss

    with torch.no_grad():
        wanted = Centred(always=False).eval()(x)
    torch.testing.assert_close(found, wanted)
    assert loss == pytest.approx(F.cross_entropy(wanted, y).item())
    assert "meet" not in caplog.text


def test_what_training_has_said_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    x, y = batch()
    with made(always=True, parts=3) as trainer:
        trainer.step(x, y)
        trainer.evaluate([(x, y)])
        trainer.predict(x)

    assert caplog.text.count("rows of the batch meet") == 1
