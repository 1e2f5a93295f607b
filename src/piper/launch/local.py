"""Start one local process per device, watch them, and leave none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SYMPTOM = 75  # exit code of a process that stopped only because another one did
GRACE = 3.0  # seconds for the others to stop by themselves


@dataclass
class Child:
    """One process of the run, and the file where it says why it failed."""

    rank: int
    process: subprocess.Popen[bytes]
    report: Path


def run_local(
    script: str, arguments: Sequence[str], processes: int, extra: Mapping[str, str] | None = None
) -> int:
    """Run a script in so many processes; the exit code and message of the first that failed.

    `extra` is what they find in their environment besides; `{rank}` in it is their rank.
    """
    with tempfile.TemporaryDirectory(prefix="piper-") as folder:
        port = free_port()
        children = [
            start(rank, processes, port, [script, *arguments], extra or {}, Path(folder))
            for rank in range(processes)
        ]
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            watch(children)
        finally:
            stop(children)
            signal.signal(signal.SIGTERM, previous)
        return verdict(children)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    rank: int,
    world: int,
    port: int,
    script: Sequence[str],
    extra: Mapping[str, str],
    folder: Path,
) -> Child:
    report = folder / f"rank-{rank}"
    command = [sys.executable, "-m", "piper.launch.child", str(report), str(os.getpid()), *script]
    everything = {
        "OMP_NUM_THREADS": "1" if world > 1 else str(os.cpu_count()),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_MODULE_LOADING": "EAGER",  # before anything touches a GPU: see runtime/hardware.py
        **os.environ,
        **{name: value.replace("{rank}", str(rank)) for name, value in extra.items()},
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return Child(rank, subprocess.Popen(command, env=everything), report)


def watch(children: Sequence[Child]) -> None:
    """Until all have ended well, or one has not."""
    while any(child.process.poll() is None for child in children):
        if any(child.process.poll() for child in children):
            return
        time.sleep(0.02)


def stop(children: Sequence[Child]) -> None:
    """End what still runs: first time to notice, then a request, then force."""
    failed = any(child.process.poll() for child in children)
    wait_all(children, GRACE if failed else 0.0)
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    wait_all(children, GRACE)
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()


def wait_all(children: Sequence[Child], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(child.process.poll() is None for child in children):
        time.sleep(0.02)


def verdict(children: Sequence[Child]) -> int:
    """Report the cause, not the symptoms: the earliest failure that was not a lost peer."""
    failed = [child for child in children if child.process.returncode]
    if not failed:
        return 0
    causes = [child for child in failed if is_cause(child)] or failed
    first = min(causes, key=lambda child: when(child.report))
    code = first.process.returncode
    reason = first.report.read_text() if first.report.exists() else ended(code)
    print(f"piper: device {first.rank} failed\n{reason.rstrip()}", file=sys.stderr)
    return code if code > 0 else 128 - code


def is_cause(child: Child) -> bool:
    """Processes that were told to stop, or that only lost a peer, caused nothing."""
    return child.process.returncode not in (SYMPTOM, -signal.SIGTERM)


def when(report: Path) -> float:
    return report.stat().st_mtime if report.exists() else 0.0


def ended(code: int) -> str:
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"  it was ended {how}"
