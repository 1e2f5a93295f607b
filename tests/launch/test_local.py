"""Runs start from one command, fail with one message, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "tiny.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent / "src")}
PIPER = [sys.executable, "-m", "piper", "run", str(SCRIPT)]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command], env=ENVIRONMENT, capture_output=True, text=True, timeout=180, check=False
    )


def losses(text: str) -> set[str]:
    return {line.split(" loss ")[1] for line in text.splitlines() if " loss " in line}


def test_the_same_script_gives_the_same_losses_under_every_launcher() -> None:
    alone = run(sys.executable, str(SCRIPT), "--pp", "1")
    local = run(*PIPER, "-n", "2", "--pp", "2")
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
    result = run(*PIPER, "-n", "2", "--bad-token", "0", "--pids", str(tmp_path))
    stopped = time.time()

    assert result.returncode == 1
    assert "piper: device 0 failed" in result.stderr
    assert "device 0 stopped at run     PP0:F@0 (w:PP0, batch:0@0)" in result.stderr
    assert "IndexError: index out of range in self" in result.stderr
    assert stopped - (tmp_path / "bad").stat().st_mtime < 10


def start_forever(folder: Path) -> tuple[subprocess.Popen[str], dict[int, int]]:
    command = [*PIPER, "-n", "2", "--forever", "--pids", str(folder)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    return process, {int(file.name): int(file.read_text()) for file in folder.iterdir()}


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


def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    process, pids = start_forever(tmp_path)

    process.kill()

    assert len(pids) == 2
    assert all_end(pids)


def test_a_device_that_is_killed_ends_the_run_within_seconds(tmp_path: Path) -> None:
    process, pids = start_forever(tmp_path)

    os.kill(pids[1], signal.SIGKILL)

    assert process.wait(timeout=10) == 128 + signal.SIGKILL
    assert "piper: device 1 failed\n  it was ended by signal SIGKILL" in process.stderr.read()
    assert all_end(pids)
