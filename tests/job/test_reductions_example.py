"""The example of streams, buckets and a reduction placed by hand: drawn, and right."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from shared_capture import using
from typer.testing import CliRunner

from piper.capture import Captured, capture
from piper.cli import app
from piper.cli.target import inspect
from piper.job.numerics import compare
from piper.models.qwen3_moe import Qwen3Moe, moe_loss

SCRIPT = Path(__file__).parents[2] / "examples" / "reductions.py"
CHOICES = ("one", "separate", "buckets", "by-hand")


@cache
def captured() -> Captured:
    """Once for all choices, and in float64."""
    example = runpy.run_path(str(SCRIPT))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return capture(Qwen3Moe(example["CONFIG"], 4).double(), moe_loss, (tokens, tokens))


def called(*arguments: object) -> str:
    with using(captured()):
        result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.soak
def test_every_choice_has_its_own_timeline(tmp_path: Path) -> None:
    pictures = set()
    for choice in CHOICES:
        called("view", SCRIPT, "--svg", tmp_path / "a.svg", "--", "--choice", choice)
        pictures.add((tmp_path / "a.svg").read_text())

    assert len(pictures) == len(CHOICES)


@pytest.mark.soak
def test_reductions_placed_by_hand_train_as_plain_pytorch() -> None:
    with using(captured()):
        found = inspect(SCRIPT, ["--choice", "by-hand"])
        result = compare(found.job, found.example, found.captured, found.compiled, steps=2)

    assert result.dtype == "float64"
    assert result.agrees, result
