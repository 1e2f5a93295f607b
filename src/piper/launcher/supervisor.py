"""An actor beside the process of a device on a cluster: starts it, and forwards its output.

The script runs in a child process. So its output from C, its crash or its exit can be observed.
The child ends when this process ends, for whatever reason.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import IO

from piper.errors import Problem
from piper.launcher.ending import Report
from piper.launcher.local import free_port
from piper.launcher.rank_assignment import Place

PATIENCE = 5.0  # seconds until an answer, even if there is no output
DRAIN = 1.0  # seconds to read after the end: grandchildren may keep the pipes open


@dataclass(frozen=True, slots=True)
class Update:
    """New lines (whether stderr, text). After the end, the exit code and the reason too."""

    lines: tuple[tuple[bool, str], ...] = ()
    code: int | None = None
    report: Report = Report()


class Supervisor:
    """An actor of a cluster. The driver calls its methods, one at a time."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.lines: list[tuple[bool, str]] = []
        self.end: tuple[int, Report] | None = None

    def place(self) -> Place:
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port of this node, which the other processes can reach."""
        address = self.place().address
        return address, free_port(address)

    def start(self, script: Sequence[str], folder: str, given: Mapping[str, str]) -> None:
        """Run a script with its arguments, in the driver's folder if this node has it.

        `given` are additional environment variables.
        """
        address = self.place().address
        if not Path(script[0]).is_file():
            fix = "put it in a folder that all nodes share, or copy it to the same path on each"
            problem = Problem(f"there is no {script[0]} on the node {address}", fix)
            self.end = (1, Report(f"  {problem}"))
            return
        report = tempfile.TemporaryFile("w+")  # has no name, so nothing is left behind  # noqa: SIM115
        where = [f"/dev/fd/{report.fileno()}", str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-m", "piper.launcher.child", *where, *script],
            env={**defaults(address), **os.environ, **given}, pass_fds=[report.fileno()],
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        Thread(target=self.follow, args=(process, report), daemon=True).start()

    def follow(self, process: subprocess.Popen[str], report: IO[str]) -> None:
        """Wait until the process has ended and its output has been read."""
        pipes = [(False, process.stdout), (True, process.stderr)]
        readers = [Thread(target=self.read, args=pipe, daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:
            reader.join(DRAIN)
        report.seek(0)
        with self.changed:
            self.end = (code, Report.from_json(report.read()))
            self.changed.notify()

    def read(self, is_error: bool, pipe: IO[str]) -> None:
        for line in pipe:
            with self.changed:
                self.lines.append((is_error, line.rstrip("\n")))
                self.changed.notify()

    def update(self) -> Update:
        """New output. Waits for some, but not longer than PATIENCE."""
        with self.changed:
            self.changed.wait_for(lambda: self.lines or self.end, PATIENCE)
            lines, self.lines = tuple(self.lines), []
            return Update(lines, *(self.end or (None, Report())))


def defaults(address: str) -> dict[str, str]:
    """Environment variables of a process, unless the user sets them."""
    name = interface(address)
    gloo = {"GLOO_SOCKET_IFNAME": name} if name else {}
    return {
        "PYTHONUNBUFFERED": "1",  # forward lines as they are printed
        "CUDA_MODULE_LOADING": "EAGER",  # before anything touches a GPU: see runtime/hardware.py
        **gloo,
    }


def interface(address: str) -> str | None:
    """The network interface of this host with an address. gloo needs its name.

    >>> interface("192.0.2.1") is None  # an address that no host has
    True
    """
    import fcntl

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
        if socket.inet_ntoa(found[20:24]) == address:
            return name
    return None
