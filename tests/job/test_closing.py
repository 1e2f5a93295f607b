"""`with piper.Trainer(...) as trainer:` closes it, also after an error in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import piper
from piper.errors import InputError
from piper.job.loop import closing

X = torch.ones(2, 3)


def made(path: Path) -> piper.Trainer:
    model = nn.Linear(3, 3)
    return piper.Trainer(model, functional.mse_loss, example=(X, X), device="cpu", log=str(path))


def test_the_end_of_the_block_closes_the_trainer(tmp_path: Path) -> None:
    with made(tmp_path / "a.csv") as trainer:
        assert isinstance(trainer, piper.Trainer)
        trainer.step(X, X)

    with pytest.raises(InputError, match="closed"):
        trainer.step(X, X)


@pytest.mark.parametrize(("processes", "closed"), [(1, True), (2, False)])
def test_an_error_is_the_scripts_and_nobody_is_waited_for(
    processes: int, closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several processes, communicators stay as they are: closing may wait for the others."""
    trainer = made(tmp_path / "a.csv")
    monkeypatch.setattr(closing, "world", lambda: processes)

    with pytest.raises(ValueError, match="no more data"), trainer:
        trainer.step(X, X)
        raise ValueError("no more data")

    assert (trainer._programs.comm is None) is closed
    trainer.close()
