"""Runs start from one command, fail with one message, and leave nothing behind."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
SCRIPTS = Path(__file__).parent.parent / "scripts"
SCRIPT, TWO_STAGES = SCRIPTS / "tiny.py", SCRIPTS / "two_stages.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent / "src")}
PIPER = [sys.executable, "-m", "piper", "run"]
IDLE = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[-1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command], env=ENVIRONMENT, capture_output=True, text=True, timeout=180, check=False
    )


def losses(text: str) -> set[str]:
    return {line.split(" loss ")[1] for line in text.splitlines() if " loss " in line}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Two devices that train, with some steps recorded: the file, the output and the errors."""
    path = tmp_path_factory.mktemp("recorded") / "run.json"
    options = ["--trace", str(path), "--trace-steps", "2:9"]
    done = run(*PIPER, str(TWO_STAGES), "-n", "2", *options)
    assert done.returncode == 0, done.stderr
    return path, done.stdout, done.stderr


def test_two_devices_train_like_plain_pytorch(recorded: tuple[Path, str, str]) -> None:
    expected = runpy.run_path(str(TWO_STAGES))["plain"]()

    said = [line.split()[1::2] for line in recorded[1].splitlines() if " loss " in line]

    for step, loss in enumerate(expected, start=1):
        both = [float(value) for number, value in said if int(number) == step]
        assert both == pytest.approx([loss, loss])
    assert len(said) == 2 * len(expected)


def test_a_run_is_recorded_and_says_where(recorded: tuple[Path, str, str]) -> None:
    """The script takes four steps and never closes its Trainer: the window is cut short."""
    path, _, errors = recorded

    traces = json.loads(path.read_text())["piper"]["traces"]

    assert [trace["step"] for trace in traces] == [2, 3, 4]
    assert "recorded only 3 of 9 steps before the end" in errors
    assert f"the trace is in {path}: `piper view {path}` shows it" in errors


def test_a_script_runs_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--pp", "1"])

    runpy.run_path(str(SCRIPT), run_name="__main__")

    assert len(losses(capsys.readouterr().out)) == 1


@pytest.mark.soak  # seven processes; each launcher has a test of its own besides
def test_the_same_script_gives_the_same_losses_under_every_launcher() -> None:
    alone = run(sys.executable, str(SCRIPT), "--pp", "1")
    local = run(*PIPER, str(SCRIPT), "-n", "2", "--pp", "2")
    torchrun = run(
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", str(SCRIPT), "--pp", "2",
    )  # fmt: skip

    assert alone.returncode == 0, alone.stderr
    assert local.returncode == 0, local.stderr
    assert torchrun.returncode == 0, torchrun.stderr
    assert len(losses(alone.stdout)) == 1
    assert losses(local.stdout) == losses(torchrun.stdout)
    assert local.stdout.count(" loss ") == torchrun.stdout.count(" loss ") == 2


def test_an_exception_on_one_device_stops_all_and_names_device_instruction_and_region(
    tmp_path: Path,
) -> None:
    result = run(*PIPER, str(SCRIPT), "-n", "2", "--bad-token", "--pids", str(tmp_path))
    stopped = time.time()

    assert result.returncode == 1
    assert "piper: device 0 failed" in result.stderr
    assert "device 0 stopped at run PP0:F@0 (w:PP0, batch:0@0)" in result.stderr
    assert "IndexError: index out of range in self" in result.stderr
    assert stopped - (tmp_path / "bad").stat().st_mtime < 10


def start_forever(folder: Path, *script: str) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """Two devices that never end by themselves, and their process ids."""
    command = [*PIPER, "-n", "2", *script, str(folder)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    end, pids = time.monotonic() + 120, dict[int, int]()
    while len(pids) < 2 and time.monotonic() < end:
        time.sleep(0.05)
        texts = {int(file.name): file.read_text() for file in folder.iterdir()}
        pids = {rank: int(text) for rank, text in texts.items() if text}
    return process, pids


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def all_end(pids: dict[int, int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids.values())) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_alive, pids.values()))


def idle(folders: pytest.TempPathFactory) -> str:
    script = folders.mktemp("idle") / "idle.py"
    script.write_text(IDLE)
    return str(script)


def test_a_run_that_is_killed_leaves_no_process_behind(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever its script does: the kernel ends the processes."""
    process, pids = start_forever(tmp_path, idle(tmp_path_factory))

    process.kill()

    assert len(pids) == 2
    assert all_end(pids)


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_device_that_is_killed_ends_the_run_within_seconds(
    trains: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = [str(SCRIPT), "--forever", "--pids"] if trains else [idle(tmp_path_factory)]
    process, pids = start_forever(tmp_path, *script)

    os.kill(pids[1], signal.SIGKILL)

    assert process.wait(timeout=10) == 128 + signal.SIGKILL
    assert "piper: device 1 failed\n  it was ended by signal SIGKILL" in process.stderr.read()
    assert all_end(pids)
