"""Runs of tests/scripts/faulty.py under a launcher, and what became of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "faulty.py"
SOURCES = Path(__file__).parent.parent.parent / "src"
LAUNCHERS = {
    "piper": [sys.executable, "-m", "piper", "run", "-n", "{n}"],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{n}",
    ],
    "ray": [sys.executable, "-m", "piper", "run", "--on", "ray", "-n", "{n}"],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its exit code, its texts, and the seconds from the fault to the end."""

    code: int
    output: str
    errors: str
    seconds: float
    left: tuple[str, ...]  # processes and folders that are still there

    @property
    def culprit(self) -> int | None:
        """The device that the launcher blames."""
        found = re.search(r"^piper: device (\d+) (failed|held up|reached)", self.errors, re.M)
        return int(found[1]) if found else None

    @property
    def losses(self) -> list[float]:
        """Of the last attempt at each step."""
        found = re.findall(r"step (\d+) loss (\S+)", self.output)
        return [loss for _, loss in sorted({int(k): float(v) for k, v in found}.items())]


def attempt(
    launcher: str, n: int, *arguments: str, options: tuple[str, ...] = (), limit: float = 240.0
) -> Outcome:
    """Run the script to its end. What it leaves behind is looked for in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, pids = Path(name, "tmp"), Path(name, "pids")
        folder.mkdir()
        pids.mkdir()
        command = [word.format(n=n) for word in LAUNCHERS[launcher]]
        given = [*command, *options, str(SCRIPT), *arguments, "--pids", str(pids)]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "GLOO_SOCKET_IFNAME": "lo"}
        if launcher != "ray":  # whose sockets need short paths, and whose logs stay
            environment["TMPDIR"] = str(folder)
        process = subprocess.Popen(
            given, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nit did not end in {limit} s"
        ended = time.time()
        began = re.search(r"fault (\S+)", output)
        seconds = ended - float(began[1]) if began else 0.0
        return Outcome(process.returncode, output, errors, seconds, left_behind(folder, pids))


def left_behind(folder: Path, pids: Path) -> tuple[str, ...]:
    """Processes that still run two seconds later, and files in the folder for temporary ones."""
    end = time.monotonic() + 2.0
    while alive := [one for one in pids.iterdir() if is_alive(int(one.read_text()))]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    files = [one.name for one in folder.iterdir() if one.name.startswith("piper")]
    return (*(f"process of device {one.name}" for one in alive), *files)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
