"""`piper checkpoint show`, as a user sees it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from piper.cli import app
from piper.view.schedule_grid import Window


def test_long_lines_are_continued_below_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["step-40: 40 steps", "  optimizer  AdamW (defaults: lr=0.001, betas=(0.9, 0.999))"]
    monkeypatch.setattr("piper.runtime.checkpoint.summary.summary", lambda folder: lines)
    monkeypatch.setattr("piper.cli.checkpoint.window_of", lambda steps, devices: Window(width=40))

    shown = CliRunner().invoke(app, ["checkpoint", "show", "runs"]).output

    assert shown.splitlines() == [
        "step-40: 40 steps",
        "  optimizer  AdamW (defaults: lr=0.001,",
        "      betas=(0.9, 0.999))",
    ]
