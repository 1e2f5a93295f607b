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
    "piper": [sys.executable, "-m", "piper", "run", "-n", "{n}", "--restarts", "{restarts}"],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{n}",
        "--max-restarts", "{restarts}",
    ],
    "ray": [
        # In a network of its own: Ray asks a public host for its own address otherwise.
        "unshare", "-Urn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh",
        sys.executable, "-m", "piper", "run", "--on", "ray", "-n", "{n}",
        "--restarts", "{restarts}",
    ],
}  # fmt: skip
NAMED = r"stopped at.*\n.*device (\d+) (?:does not answer|waits for nobody)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its exit code, its texts, and what is still there of it."""

    code: int
    output: str
    errors: str
    ended: float  # by the clock, as all times here
    left: tuple[str, ...] = ()  # processes and folders

    @property
    def culprit(self) -> int | None:
        """The device that the launcher blames."""
        found = re.search(r"^piper: device (\d+) (failed|held up|reached)", self.errors, re.M)
        return int(found[1]) if found else None

    @property
    def root_cause(self) -> int | None:
        """The process that the others blame under torchrun, or that torchrun blames."""
        named = {int(one) for one in re.findall(NAMED, self.errors)}
        found = re.search(r"^Root Cause.*?rank\s*: (\d+)", self.errors, re.M | re.S)
        own = {int(found[1])} if found else set()
        return next(iter(named or own)) if len(named) < 2 else None

    @property
    def losses(self) -> list[float]:
        """Of the last attempt at each step."""
        found = re.findall(r"step (\d+) loss (\S+)", self.output)
        return [loss for _, loss in sorted({int(k): float(v) for k, v in found}.items())]

    def times(self, what: str) -> list[float]:
        """When a line of the script was printed, each time."""
        return sorted(float(one) for one in re.findall(rf"{what} (\d+\.\d+)$", self.output, re.M))

    @property
    def fault(self) -> float | None:
        """When the fault came, if it did."""
        return next(iter(self.times("fault")), None)

    @property
    def seconds(self) -> float:
        """From the fault to the end, or to the next attempt, whose processes have just started."""
        if self.fault is None:
            return 0.0
        later = [one for one in self.times("began") if one > self.fault]
        return (later[0] if later else self.ended) - self.fault

    @property
    def restart(self) -> float | None:
        """Seconds from the fault to the end of the next step."""
        steps = self.times(r"step \d+ loss \S+")
        return next((one - self.fault for one in steps if self.fault and one > self.fault), None)

    @property
    def start(self) -> float:
        """Seconds from the start of the processes to the end of the first step."""
        return self.times(r"step \d+ loss \S+")[0] - self.times("began")[0]


def attempt(launcher: str, n: int, *given: str, restarts: int = 0, limit: float = 300.0) -> Outcome:
    """Run the script to its end. What it leaves behind is looked for in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, pids = Path(name, "tmp"), Path(name, "pids")
        folder.mkdir()
        pids.mkdir()
        words = (word.format(n=n, restarts=restarts) for word in LAUNCHERS[launcher])
        command = [*words, str(SCRIPT), *given, "--pids", str(pids)]
        if "--once" in given:
            command += ["--checkpoint", f"{name}/checkpoint"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "GLOO_SOCKET_IFNAME": "lo"}
        if launcher != "ray":  # whose sockets need short paths, and whose logs stay
            environment["TMPDIR"] = str(folder)
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nit did not end in {limit} s"
        ended = time.time()
        return Outcome(process.returncode, output, errors, ended, left_behind(folder, pids))


def left_behind(folder: Path, pids: Path) -> tuple[str, ...]:
    """Processes that still run two seconds later, and files in the folder for temporary ones."""
    end = time.monotonic() + 2.0
    while alive := [one for one in pids.iterdir() if is_alive(int(one.name.split()[0]))]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    files = [one.name for one in folder.iterdir() if one.name.startswith("piper")]
    return (*(f"process {one.name}" for one in alive), *files)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
