"""Which process is blamed when several have failed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from piper.errors import ECHO
from piper.launch import child
from piper.launch.ending import SYMPTOM, Ended, verdict


def test_a_cause_comes_before_symptoms(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, SYMPTOM, 1.0, "  lost"), Ended(1, 3, 2.0, "  bad batch")]) == 3
    assert capsys.readouterr().err == "piper: device 1 failed\n  bad batch\n"


def test_who_leaves_the_others_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, SYMPTOM, 1.0, "  lost"), Ended(1, 0)]) == 1
    assert capsys.readouterr().err == (
        "piper: device 1 reached the end of its script while device 0 still waited for it\n"
        "  fix: run the same steps and make the same calls of the Trainer in every process\n"
    )


def test_of_symptoms_one_with_a_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that was told to stop has no report, and seems to have ended first."""
    stopped = Ended(1, -signal.SIGTERM)

    assert verdict([Ended(0, SYMPTOM, 1.0, "  an exchange failed"), stopped]) == SYMPTOM
    assert capsys.readouterr().err == "piper: device 0 failed\n  an exchange failed\n"


def test_nothing_is_said_of_a_run_that_ended_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, 0), Ended(1, 0)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("echo", "code"), [(True, SYMPTOM), (False, 1)])
def test_an_error_that_another_device_met_is_a_symptom(
    echo: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That device's report has the user's line, this one only how it was told."""

    def fail(*_: object, **__: object) -> None:
        error = ValueError("of the model")
        if echo:
            error.add_note(ECHO)
        raise error

    monkeypatch.setattr(child, "die_with", lambda _: None)
    monkeypatch.setattr(child, "log_progress", lambda: None)
    monkeypatch.setattr(child.runpy, "run_path", fail)
    monkeypatch.setattr(child.sys, "argv", [])
    monkeypatch.setattr(child.sys, "path", [])

    assert child.main(tmp_path / "report", 0, "train.py", []) == code
    assert "ValueError: of the model" in (tmp_path / "report").read_text()
