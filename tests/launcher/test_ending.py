"""Which process is blamed when several have failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher.fault_runs import SOURCES, is_alive

from piper.errors import ECHO, PiperError
from piper.launcher import child
from piper.launcher.ending import SYMPTOM, Ended, Report, report_in, verdict
from piper.launcher.local import Child, ended


def test_a_cause_comes_before_symptoms(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, SYMPTOM, 1.0, "  lost"), Ended(1, 3, 2.0, "  bad batch")]) == 3
    assert capsys.readouterr().err == "piper: device 1 failed\n  bad batch\n"


def test_who_leaves_the_others_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = Ended(0, SYMPTOM, 1.0, "  lost", line="\n  at train.py:9: trainer.state_dict()")
    assert verdict([waiting, Ended(1, 0)]) == 1
    assert capsys.readouterr().err == (
        "piper: device 1 reached the end of its script while device 0 still waited for it\n"
        "  at train.py:9: trainer.state_dict()\n"
        "  fix: run the same steps and make the same calls of the Trainer in every process\n"
    )


def test_of_symptoms_one_with_a_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that was told to stop has no report, and seems to have ended first."""
    stopped = Ended(1, -signal.SIGTERM, asked=True)

    assert verdict([Ended(0, SYMPTOM, 1.0, "  an exchange failed"), stopped]) == SYMPTOM
    assert capsys.readouterr().err == "piper: device 0 failed\n  an exchange failed\n"


def test_a_report_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    for make in (os.mkdir, os.mkfifo):  # reading a pipe would never end
        make(path)
        assert report_in(path) == Report()
        path.rmdir() if path.is_dir() else path.unlink()
    for content in (b"", b"\xff\xfe[[", b"[" * 100_000, b"{}", b'{"reason": 3}', b'{"when": "x"}'):
        path.write_bytes(content)
        assert report_in(path) == Report()
    path.write_text(Report("  it failed", 1, 2.0).to_json())
    assert report_in(path) == Report("  it failed", 1, 2.0)


def test_nothing_is_said_of_a_run_that_ended_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, 0), Ended(1, 0)]) == 0
    assert capsys.readouterr().err == ""


class Abort(BaseException):
    """No Exception, as libraries have some."""


@pytest.mark.parametrize(
    ("kind", "echo", "code"),
    [
        (ValueError, True, SYMPTOM),
        (ValueError, False, 1),
        (Abort, False, 1),
        (PiperError, True, SYMPTOM),
        (PiperError, False, 1),
    ],  # fmt: skip
)
def test_an_error_that_another_device_met_is_a_symptom(
    kind: type, echo: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That device's report has the user's line, this one only how it was told."""

    def fail(*_: object, **__: object) -> None:
        error = kind("of the model")
        if echo:
            error.add_note(ECHO)
        raise error

    monkeypatch.setattr(child, "die_with", lambda _: None)
    monkeypatch.setattr(child, "log_progress", lambda: None)
    monkeypatch.setattr(child.runpy, "run_path", fail)
    monkeypatch.setattr(child.sys, "argv", [])
    monkeypatch.setattr(child.sys, "path", [*child.sys.path])

    assert child.main(tmp_path / "report", 0, "train.py", []) == code
    assert "of the model" in (tmp_path / "report").read_text()


def test_a_signal_from_outside_is_a_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([Ended(0, SYMPTOM, 1.0, "  lost"), Ended(1, -signal.SIGTERM)]) == 143
    assert capsys.readouterr().err == ("piper: device 1 failed\n  it was ended by signal SIGTERM\n")


def test_the_device_that_the_others_wait_for_is_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    lost = Ended(0, SYMPTOM, 1.0, "device 0 stopped at\n  device 2 does not answer", 2)
    stopped = Ended(2, -signal.SIGKILL, asked=True)

    assert verdict([lost, Ended(1, SYMPTOM, 0.5, "  lost"), stopped]) == 1
    assert capsys.readouterr().err == (
        "piper: device 2 held up the others\n  device 0 stopped at\n  device 2 does not answer\n"
    )


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("import sys; sys.exit(3)", 3, "its script ended with sys.exit(3)"),
        ("import sys; sys.exit('bad')", 1, "its script ended with sys.exit('bad')"),
        ("import sys; sys.exit()", 0, ""),
        ("raise KeyboardInterrupt", 130, "it was interrupted"),
        ("raise MemoryError", 1, "it is out of memory"),
        ("import torch; torch.empty(2**60, dtype=torch.uint8)", 1, "it is out of memory"),
        ("import torch; raise torch.OutOfMemoryError('CUDA')", 1, "it is out of memory"),
        ("raise RuntimeError('[/pytorch/gloo/transport/tcp/pair.cc:5] closed')", SYMPTOM, "pair"),
    ],
)
def test_every_end_of_a_script_is_reported(
    script: str, code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setattr(child, "die_with", lambda _: None)
    monkeypatch.setattr(child.sys, "argv", [])
    monkeypatch.setattr(child.sys, "path", [*child.sys.path])

    assert child.main(tmp_path / "report", 0, str(tmp_path / "train.py"), []) == code
    assert reason in ((tmp_path / "report").read_text() if code else "")


PARSER = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int)
{call}
"""


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("parser.parse_args(['--size', 'big'])", "piper: device 0 failed\n  usage: train.py [-h] "
         "[--size SIZE]\n  train.py: error: argument --size: invalid int value: 'big'\n"),
        ("parser.exit(3, 'no data\\n')", "piper: device 0 failed\n  no data\n"),
        ("raise SystemExit('no data')", "piper: device 0 failed\n"
         "  its script ended with sys.exit('no data')\n  FOLDER/train.py:4, in <module>\n"),
        ("raise SystemExit('no data\\nhere')", "piper: device 0 failed\n"
         "  its script ended with sys.exit:\n  no data\n  here\n  FOLDER/train.py:4, in "
         "<module>\n"),
        ("parser.print_help(); parser.exit()", "usage: train.py [-h] [--size SIZE]\n\noptions:\n"
         "  -h, --help   show this help message and exit\n  --size SIZE\n"),
        ("parser.print_usage(__import__('sys').stderr)", "usage: train.py [-h] [--size SIZE]\n"),
    ],
)  # fmt: skip
def test_what_every_process_says_of_its_arguments_is_shown_once(
    call: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Device 1 ends first. Both processes have the same arguments."""
    script, ends = tmp_path / "train.py", list[Ended]()
    script.write_text(PARSER.format(call=call))
    monkeypatch.setattr(child, "die_with", lambda _: None)
    monkeypatch.setattr(child, "log_progress", lambda: None)  # its handler would stay
    monkeypatch.setattr(child.sys, "argv", [])
    monkeypatch.setattr(child.sys, "path", [*child.sys.path])
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        report = tmp_path / f"report-{rank}"
        code = child.main(report, 0, str(script), [])
        found = report_in(report)
        ends.insert(0, Ended(rank, code, found.when, found.reason))

    verdict(ends)

    printed = capsys.readouterr()
    assert (printed.out + printed.err).replace(str(tmp_path), "FOLDER") == shown


def test_half_a_report_is_none() -> None:
    assert Report.from_json('{"reason": "x"') == Report.from_json("") == Report()


def test_clocks_that_jump_do_not_change_who_was_first(tmp_path: Path) -> None:
    """Files have the time of the wall clock, which may go back between two failures."""
    children = []
    for rank, written in ((0, 9.0), (1, 5.0)):
        process = subprocess.run(["false"], check=False)
        children.append(Child(rank, process, tmp_path / f"rank-{rank}"))  # type: ignore[arg-type]
        child.tell(children[-1].report, f"  {rank}")
        os.utime(children[-1].report, (written, written))

    first, second = (ended(one) for one in children)

    assert 0.0 < first.when < second.when


def test_what_torchrun_starts_ends_with_it() -> None:
    """A launcher that is killed at once cannot end its processes."""
    script = (
        "import os, subprocess, sys\n"
        "code = 'import time; from piper.launcher.parent_death import die_with_torchrun as do;"
        "do(); print(1, flush=True); time.sleep(600)'\n"
        "one = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "one.stdout.readline()\n"
        "print(one.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": str(SOURCES)}

    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=False
    )

    end = time.monotonic() + 30
    while is_alive(int(found.stdout)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_alive(int(found.stdout))
