"""Signals end a run as its user wants, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from draws import every
from launcher.fault_runs import SOURCES, is_alive

from piper.job.processes.stopping import StopRequest
from piper.launcher.private_folder import private_folder
from piper.launcher.restarts import with_restarts
from piper.launcher.signals import Received, received_signals

pytestmark = pytest.mark.processes
IDLE = """
import os, pathlib, signal, sys, time
asked = []
if "--handler" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.time()))
folder = pathlib.Path(sys.argv[1])
(folder / ("new" + os.environ["RANK"])).write_text(str(os.getpid()))
(folder / ("new" + os.environ["RANK"])).rename(folder / os.environ["RANK"])
while not asked or "--stubborn" in sys.argv:
    time.sleep(0.05)
(folder / f"{os.environ['RANK']}.saved").touch()
"""


class Run:
    """Two processes that wait, under `piper run`, with folders of their own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.pids, self.temporary = folder / "pids", folder / "tmp"
        self.pids.mkdir()
        self.temporary.mkdir()
        (folder / "idle.py").write_text(IDLE)
        command = [sys.executable, "-m", "piper", "run", "-n", "2", str(folder / "idle.py")]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [*command, str(self.pids), *options], env=environment, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.wait_for(lambda: len(self.found) == 2)

    @property
    def found(self) -> list[int]:
        return [int(one.read_text()) for one in self.pids.iterdir() if one.name in ("0", "1")]

    def wait_for(self, condition: object) -> bool:
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:  # type: ignore[operator]
            time.sleep(0.05)
        return bool(condition())  # type: ignore[operator]

    def is_gone(self) -> bool:
        """No process and no folder is left."""
        nobody = not any(map(is_alive, self.found))
        return nobody and not any(one.name.startswith("piper") for one in self.temporary.iterdir())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    runs: list[Run] = []

    def begin(*options: str) -> Run:
        runs.append(Run(tmp_path, *options))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()


@pytest.mark.parametrize(
    "number", every(2, [signal.SIGKILL, signal.SIGTERM], ["SIGKILL", "SIGTERM"])
)
def test_nothing_stays_of_a_run_whose_launcher_gets(number: signal.Signals, start: object) -> None:
    run = start()  # type: ignore[operator]

    run.process.send_signal(number)

    run.process.wait(timeout=30)
    assert run.process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert run.wait_for(run.is_gone)


@pytest.mark.soak
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT], ids=lambda n: n.name
)
def test_nothing_stays_of_a_run_whose_launcher_gets_others(
    number: signal.Signals, start: object
) -> None:
    test_nothing_stays_of_a_run_whose_launcher_gets(number, start)


def test_a_handler_of_the_users_may_finish_and_save(start: object) -> None:
    run = start("--handler")  # type: ignore[operator]

    os.killpg(run.process.pid, signal.SIGINT)  # as Ctrl-C does

    assert run.process.wait(timeout=30) == 130
    assert {one.name for one in run.pids.glob("*.saved")} == {"0.saved", "1.saved"}
    assert "piper: SIGINT: the processes end (a second signal" in run.process.stderr.read()
    assert run.wait_for(run.is_gone)


def test_a_second_signal_ends_at_once(start: object) -> None:
    run = start("--handler", "--stubborn")  # type: ignore[operator]

    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)

    assert run.process.wait(timeout=30) == 130
    assert run.wait_for(run.is_gone)


def test_a_private_folder_is_gone_afterwards() -> None:
    with private_folder("piper-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700

    assert not folder.exists()


def test_a_run_is_started_again_until_it_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    codes, started = [1, 137, 0, 1], []

    def start(processes: int, more: dict[str, str]) -> int:
        started.append((processes, more["PIPER_RESTART"]))
        return codes[len(started) - 1]

    assert with_restarts(start, 4, 5, 3) == 0
    assert started == [(4, "0"), (3, "1"), (3, "2")]
    assert capsys.readouterr().err == (
        "piper: restart 1 of 5, with 3 processes\npiper: restart 2 of 5, with 3 processes\n"
    )


def test_a_run_that_was_stopped_is_not_started_again() -> None:
    def start(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        return 143

    assert with_restarts(start, 2, 5, None) == 143


def test_restarts_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert with_restarts(lambda *_: 7, 2, 2, None) == 7
    assert capsys.readouterr().err.count("piper: restart") == 2


def test_signals_are_noted_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with received_signals() as outer, received_signals() as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    assert inner is outer
    assert outer.numbers == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    assert Received().code == 0


class Saved:
    """Stands for a Trainer."""

    steps = 7

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save(self, folder: str | Path, *, keep: int) -> None:
        self.calls.append(f"save {folder}")
        assert keep > 1000  # the script says which of them may go

    def close(self) -> None:
        self.calls.append("close")


def test_a_signal_saves_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("PIPER_SAVE_ON_SIGNAL", "there")
    request, trainer = StopRequest(), Saved()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert request.wanted
        request.leave(trainer)
        assert trainer.calls == []  # not before all processes know

        request.agreed = True
        with pytest.raises(SystemExit, match="0"):
            request.leave(trainer)
    finally:
        signal.signal(signal.SIGTERM, previous)

    assert trainer.calls == ["save there", "close"]
