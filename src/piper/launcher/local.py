"""Start one local process per device, watch them, and leave none behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from piper.launcher.ending import GRACE, Ended, report_in, verdict
from piper.launcher.private_folder import private_folder
from piper.launcher.signals import SAVE, Received, announce, received_signals


@dataclass
class Child:
    """One process of the run, and the file to which it writes why it failed."""

    rank: int
    process: subprocess.Popen[bytes]
    report: Path
    asked: bool = False  # to end, by this launcher


def run_local(
    script: str, arguments: Sequence[str], processes: int, extra: Mapping[str, str] | None = None
) -> int:
    """Run a script in several processes. Returns the exit code of the one that failed first.

    `extra` are additional environment variables. `{rank}` in a value stands for the rank.
    """
    code, found = run_processes(script, arguments, processes, extra)
    return code or verdict(found)


def run_processes(
    script: str, arguments: Sequence[str], processes: int, extra: Mapping[str, str] | None = None
) -> tuple[int, list[Ended]]:
    """Run a script in several processes, and say how each ended.

    The number is the exit code of a run that a signal to this process ended, and 0 otherwise.
    """
    with private_folder("piper-") as folder, received_signals() as received:
        given, port = extra or {}, free_port()
        children = [
            start(rank, processes, port, [script, *arguments], given, folder)
            for rank in range(processes)
        ]
        try:
            watch(children, received)
            if received.numbers:
                announce(received.numbers[0], given.get(SAVE))
                ask(children)
                wait_unless_asked_again(children, received)
        finally:
            stop(children, at_once=len(received.numbers) > 1)
        return received.code, [ended(child) for child in children]


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def start(
    rank: int, world: int, port: int, script: Sequence[str], extra: Mapping[str, str], folder: Path
) -> Child:
    report = folder / f"rank-{rank}"
    command = [sys.executable, "-m", "piper.launcher.child", str(report), str(os.getpid()), *script]
    everything = {
        "OMP_NUM_THREADS": "1" if world > 1 else str(os.cpu_count()),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_MODULE_LOADING": "EAGER",  # before anything touches a GPU: see runtime/hardware.py
        **os.environ,
        **{name: value.replace("{rank}", str(rank)) for name, value in extra.items()},
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PIPER_STORE": str(folder / "store"),
    }  # fmt: skip
    return Child(rank, subprocess.Popen(command, env=everything), report)


def watch(children: Sequence[Child], received: Received) -> None:
    """Wait until all have ended, one has failed, or a signal came. Tell the others of each end."""
    while not received.numbers and any(child.process.poll() is None for child in children):
        if any(child.process.poll() for child in children):
            return
        for child in children:
            if child.process.poll() == 0:
                child.report.with_name(f"ended-{child.rank}").touch()
        time.sleep(0.02)


def ask(children: Sequence[Child]) -> None:
    """Ask the processes to end. A handler of the user's may finish a step and save first."""
    for child in children:
        if child.process.poll() is None:
            child.asked = True
            child.process.terminate()


def wait_unless_asked_again(children: Sequence[Child], received: Received) -> None:
    """Wait until all have ended, one has failed, or another signal came."""
    while len(received.numbers) < 2 and any(child.process.poll() is None for child in children):
        if any(child.process.poll() for child in children):
            return
        time.sleep(0.02)


def stop(children: Sequence[Child], at_once: bool = False) -> None:
    """End the processes that still run: wait after a failure, then SIGTERM, then SIGKILL."""
    if at_once:
        kill(children)
    failed = [child for child in children if child.process.poll()]
    known = any(ended(child).culprit is not None for child in failed)
    wait_all(children, (1.0 if known else GRACE) if failed else 0.0)
    for child in children:
        if child.process.poll() is None:
            ask([child])
    wait_all(children, GRACE)
    kill(children)


def kill(children: Sequence[Child]) -> None:
    for child in children:
        if child.process.poll() is None:
            child.asked = True
            child.process.kill()
            child.process.wait()


def wait_all(children: Sequence[Child], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(child.process.poll() is None for child in children):
        time.sleep(0.02)


def ended(child: Child) -> Ended:
    """A process without a report was killed. That is earlier than what its peers report."""
    why, code = report_in(child.report), child.process.returncode
    return Ended(child.rank, code, why.when, why.reason, why.culprit, child.asked, why.line)
