"""A `print` in a forward is shown once, and the log says what it is about."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import piper
from piper.job.loop import forward_prints
from piper.strategies import gpipe

X, Y = torch.randn(4, 3), torch.randn(4, 2)


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        found = self.layer(x)
        print("mean", found.mean().item())
        print("made", "of", "parts", end=".\n")
        for k in range(3):
            sys.stdout.write(f"layer {k}\n")
        return found


def loss(output: Tensor, labels: Tensor) -> Tensor:
    print("a loss")
    return mse_loss(output, labels)


@pytest.fixture(autouse=True)
def _nothing_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_prints, "_over", set())


def test_each_line_is_shown_once_and_named_in_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = sys.stdout
    with piper.Trainer(
        Printing(), loss, gpipe(pp=1, microbatches=2), example=(X, Y), device="cpu"
    ) as trainer:
        trainer.step(X, Y)
        trainer.step(X, Y)
        trainer.evaluate([(X, Y)])

    shown = capsys.readouterr().out.splitlines()
    assert shown == ["mean ?", "made of parts.", "layer 0", "a loss"]
    said = [line for line in caplog.messages if " prints: before the first step, " in line]
    assert len(said) == 4 and all(line.startswith("test_forward_prints.py:") for line in said)
    assert sys.stdout is before


def test_a_rehearsal_shows_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    piper.rehearse(Printing(), loss, gpipe(pp=1, microbatches=2), [(X, Y)])

    assert capsys.readouterr().out.count("mean ") == 1


def test_what_the_script_prints_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with forward_prints.prints_shown_once():
        for _ in range(2):
            forward_prints_of_piper()

    assert capsys.readouterr().out == "compiled\ncompiled\n"


def forward_prints_of_piper() -> None:
    """As a line of Piper's own, which a logger may print."""
    exec(compile("print('compiled')", forward_prints.__file__, "exec"))
