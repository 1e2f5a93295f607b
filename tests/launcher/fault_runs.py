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
from threading import Thread

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
BLAMED = re.compile(r"^piper: device (\d+) (?:failed|held up|reached)", re.MULTILINE)
MISSED = "does not answer|waits for no other device|has made no Trainer"
NAMED = rf"(?:stopped|in vain).*at .*\n.*device (\d+) (?:{MISSED})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its exit code, its texts, and what is still there of it."""

    code: int
    output: str
    errors: str
    ended: float  # by the clock, as all times here
    told: tuple[float, ...]  # when Piper's launcher said who was to blame
    left: tuple[str, ...] = ()  # processes and folders

    @property
    def culprits(self) -> list[int]:
        """The devices that Piper's launchers blame, one for each attempt that failed."""
        return [*map(int, BLAMED.findall(self.errors))]

    @property
    def root_cause(self) -> int | None:
        """The process that the others blame under torchrun, or that torchrun blames."""
        named = {int(one) for one in re.findall(NAMED, self.errors)}
        found = re.search(r"^Root Cause.*?rank\s*: (\d+)", self.errors, re.M | re.S)
        own = {int(found[1])} if found else set()
        blamed = named or own
        return blamed.pop() if len(blamed) == 1 else None

    @property
    def losses(self) -> list[float]:
        """Of the last attempt at each step."""
        found = re.findall(r"step (\d+) loss (\S+)", self.output)
        return [loss for _, loss in sorted({int(k): float(v) for k, v in found}.items())]

    def times(self, what: str) -> list[float]:
        """When a line of the script was printed, each time."""
        return sorted(float(one) for one in re.findall(rf"{what} (\d+\.\d+)$", self.output, re.M))

    @property
    def stops(self) -> list[float]:
        """Seconds from each fault until the launcher says who was to blame, or else until the next
        processes start, or the end."""
        known = [*self.told] or self.times("began")
        return [next_after(fault, known) or self.ended - fault for fault in self.times("fault")]

    @property
    def restarts(self) -> list[float | None]:
        """Seconds from each fault to the end of the next step."""
        steps = self.times(r"step \d+ loss \S+")
        return [next_after(fault, steps) for fault in self.times("fault")]

    @property
    def start(self) -> float:
        """Seconds from the start of the processes to the end of the first step."""
        return self.times(r"step \d+ loss \S+")[0] - self.times("began")[0]


def next_after(when: float, times: list[float]) -> float | None:
    """Seconds until the next one."""
    return next((one - when for one in times if one > when), None)


def attempt(
    launcher: str, n: int, *given: str, restarts: int = 0, limit: float = 1500.0
) -> Outcome:
    """Run the script to its end. What it leaves behind is looked for in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, pids = Path(name, "tmp"), Path(name, "pids")
        folder.mkdir()
        pids.mkdir()
        words = (word.format(n=n, restarts=restarts) for word in LAUNCHERS[launcher])
        command = [*words, str(SCRIPT), *given, "--pids", str(pids)]
        command += ["--checkpoint", f"{name}/checkpoint"] if restarts else []
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "GLOO_SOCKET_IFNAME": "lo"}
        if launcher != "ray":  # whose sockets need short paths, and whose logs stay
            environment["TMPDIR"] = str(folder)
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        output, errors, told = followed(process, limit)
        ended = time.time()
        return Outcome(process.returncode, output, errors, ended, told, left_behind(folder, pids))


def followed(process: subprocess.Popen[str], limit: float) -> tuple[str, str, tuple[float, ...]]:
    """What a run prints until its end, and when it said who was to blame."""
    output, errors, told = list[str](), list[str](), list[float]()

    def read_errors() -> None:
        for line in process.stderr:
            told.extend([time.time()] if BLAMED.match(line) else [])
            errors.append(line)

    readers = [Thread(target=lambda: output.extend(process.stdout)), Thread(target=read_errors)]
    for reader in readers:
        reader.start()
    try:
        process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        errors.append(f"it did not end in {limit} s\n")
    for reader in readers:
        reader.join(10.0)  # a process that is left may keep them open
    return "".join(output), "".join(errors), tuple(told)


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
