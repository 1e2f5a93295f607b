"""Commands that take long say what they do."""

from __future__ import annotations

import logging
import time

import pytest

from piper.cli import progress
from piper.cli.progress import LOG, told_if_slow


def test_a_fast_command_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    level = LOG.level

    with told_if_slow("train.py"):
        LOG.info("captured 1 region")

    assert capsys.readouterr().err == ""
    assert LOG.level == level


def test_a_slow_command_says_so_and_what_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    before = LOG.level, list(LOG.handlers)

    with told_if_slow("train.py: compiling"):
        until = time.monotonic() + 10
        while LOG.handlers == before[1] and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        logging.getLogger("piper").info("captured 1 region")

    assert capsys.readouterr().err.splitlines() == [
        "piper: train.py: compiling is taking more than 0 seconds",
        "piper: captured 1 region",
    ]
    assert (LOG.level, LOG.handlers) == before
