"""On a cluster, what sits beside the process of a device: starts it, and tells what it prints.

The process is not this one: whatever it does (print from C, crash, exit) is seen from outside, and
it ends with this one, however that happens.
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
from piper.launch.local import free_port
from piper.launch.rank_assignment import Place

PATIENCE = 5.0  # seconds until an answer even if there is nothing new
DRAIN = 1.0  # seconds to read on after the end: what a process left behind may keep its pipes open


@dataclass(frozen=True, slots=True)
class News:
    """Lines since the last time (is it stderr, the text); once it has ended, how and why."""

    lines: tuple[tuple[bool, str], ...] = ()
    code: int | None = None
    reason: str = ""


class Keeper:
    """An actor of a cluster; its methods are called by the driver, one at a time."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.lines: list[tuple[bool, str]] = []
        self.end: tuple[int, str] | None = None

    def place(self) -> Place:
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def meeting_point(self) -> tuple[str, int]:
        """An address and a port of this node that the others can come to."""
        address = self.place().address
        return address, free_port(address)

    def start(self, script: Sequence[str], folder: str, given: Mapping[str, str]) -> None:
        """Run a script with its arguments in the driver's folder, if there is one like it here.

        `given` is what it finds in its environment besides what is here.
        """
        address = self.place().address
        if not Path(script[0]).is_file():
            fix = "put it in a folder that all nodes share, or copy it to the same place on each"
            problem = Problem(f"there is no {script[0]} on the node {address}", fix)
            self.end = (1, f"  {problem}")
            return
        report = tempfile.TemporaryFile("w+")  # has no name: nothing is left behind  # noqa: SIM115
        where = [f"/dev/fd/{report.fileno()}", str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-m", "piper.launch.child", *where, *script],
            env={**defaults(address), **os.environ, **given}, pass_fds=[report.fileno()],
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        Thread(target=self.follow, args=(process, report), daemon=True).start()

    def follow(self, process: subprocess.Popen[str], report: IO[str]) -> None:
        """Until the process has ended and has been read to its end."""
        pipes = [(False, process.stdout), (True, process.stderr)]
        readers = [Thread(target=self.read, args=pipe, daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:
            reader.join(DRAIN)
        report.seek(0)
        with self.changed:
            self.end = (code, report.read())
            self.changed.notify()

    def read(self, is_error: bool, pipe: IO[str]) -> None:
        for line in pipe:
            with self.changed:
                self.lines.append((is_error, line.rstrip("\n")))
                self.changed.notify()

    def news(self) -> News:
        """What is new; waits until something is, but not for ever."""
        with self.changed:
            self.changed.wait_for(lambda: self.lines or self.end, PATIENCE)
            lines, self.lines = tuple(self.lines), []
            return News(lines, *(self.end or (None, "")))


def defaults(address: str) -> dict[str, str]:
    """What a process finds unless the user says otherwise."""
    name = interface(address)
    gloo = {"GLOO_SOCKET_IFNAME": name} if name else {}
    return {
        "PYTHONUNBUFFERED": "1",  # lines come when they are printed
        "CUDA_MODULE_LOADING": "EAGER",  # before anything touches a GPU: see runtime/hardware.py
        **gloo,
    }


def interface(address: str) -> str | None:
    """The network interface of this host that has an address: gloo asks for its name.

    >>> interface("192.0.2.1") is None  # an address that nobody has
    True
    """
    import fcntl

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
            except OSError:  # it has no such address
                continue
        if socket.inet_ntoa(found[20:24]) == address:
            return name
    return None
