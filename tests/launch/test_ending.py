"""Which process is blamed when several have failed."""

from __future__ import annotations

import signal

import pytest

from piper.launch.ending import SYMPTOM, Ended, verdict


def test_a_cause_comes_before_symptoms(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, SYMPTOM, 1.0, "  lost"), Ended(1, 3, 2.0, "  bad batch")]) == 3
    assert capsys.readouterr().err == "piper: device 1 failed\n  bad batch\n"


def test_of_symptoms_one_with_a_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that was told to stop has no report, and seems to have ended first."""
    stopped = Ended(1, -signal.SIGTERM)

    assert verdict([Ended(0, SYMPTOM, 1.0, "  an exchange failed"), stopped]) == SYMPTOM
    assert capsys.readouterr().err == "piper: device 0 failed\n  an exchange failed\n"


def test_nothing_is_said_of_a_run_that_ended_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, 0), Ended(1, 0)]) == 0
    assert capsys.readouterr().err == ""
