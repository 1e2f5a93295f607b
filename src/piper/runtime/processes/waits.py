"""Who waits for whom: what the processes of a run tell each other when one of them is stuck.

A process that has waited too long asks. In every other process, a thread answers with what its main
thread is doing. A process that does not answer is stopped, dead or overloaded: the others wait for
it. If all answer, they wait for one that works by itself, say in a data loader.

The answers travel through the store, over a connection of their own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from piper.errors import PeerLost
from piper.names import amount
from piper.runtime.processes.activity import Status, activity, waiting
from piper.runtime.processes.store import ATTEMPT

Found = TypeVar("Found")
ASKED = "piper/who waits"
ANSWER = 2.5  # seconds to wait for answers
POLL = 0.5  # seconds between looks at whether somebody asks


@dataclass
class Board:
    """Where the processes of a run write what they do."""

    store: dist.Store
    device: int
    world: int
    patience: timedelta
    ended: threading.Event = field(default_factory=threading.Event)

    def answer(self) -> None:
        """Answer whenever somebody asks, until the process ends."""
        while not self.ended.wait(POLL):
            try:
                if self.store.check([ASKED]):
                    self.post()
            except Exception:  # the store is gone, and so is the run
                return

    def post(self) -> None:
        text = json.dumps(activity.status(self.device).to_json())
        self.store.set(key(self.device), text)

    def ask(self) -> dict[int, Status]:
        """What the others do. Those that do not answer in time are left out."""
        self.post()
        self.store.set(ASKED, "")
        end = time.monotonic() + ANSWER
        while len(found := self.answers()) < self.world and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def answers(self) -> dict[int, Status]:
        keys = [rank for rank in range(self.world) if self.store.check([key(rank)])]
        texts = {rank: self.store.get(key(rank)) for rank in keys}
        return {rank: Status.from_json(json.loads(text)) for rank, text in texts.items()}

    def asked(self) -> bool:
        return bool(self.store.check([ASKED]))


_board: Board | None = None  # of this process, once it has joined others


def key(device: int) -> str:
    return f"piper/status of {device}"


def open_board(store: dist.Store, device: int, world: int, patience: timedelta) -> None:
    """Answer from now on. `store` is used by nobody else: a wait in it would block the answers."""
    global _board
    if _board is not None:
        _board.ended.set()
    _board = Board(store, device, world, patience)
    threading.Thread(target=_board.answer, name="piper answers", daemon=True).start()


@contextmanager
def peers_needed(what: str, peers: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, this process waits for others (None: for all). An error means that one is lost."""
    with waiting(what, tuple(range(dist.get_world_size()) if peers is None else peers)):
        try:
            yield
        except RuntimeError as error:
            raise lost(dist.get_rank(), what, str(error)) from error


def lost(device: int, what: str, reason: str) -> PeerLost:
    """The error of a process that cannot go on without another. It says who that is, if it can."""
    found = within(explained, 2 * ANSWER) if _board is not None else None
    if found is None:
        return PeerLost(device, what, reason)
    culprit, text = found
    return PeerLost(device, what, text, culprit)


def explained() -> tuple[int | None, str] | None:
    """The device that all wait for, and what each does.

    None: this process did not wait long, and its launcher knows better who ended first. torchrun
    does not: it blames the first process whose end it sees. So ask, and end later than the cause.
    """
    assert _board is not None
    late = activity.seconds > 0.5 * _board.patience.total_seconds()
    if not late and not _board.asked() and ATTEMPT not in os.environ:
        _board.post()  # somebody may ask later
        return None
    found = _board.ask()
    culprit = held_up_by(found, _board.device, _board.world)
    return culprit, "\n  ".join(lines(found, culprit, _board.world))


def within(act: Callable[[], Found], seconds: float) -> Found | None:
    """The result of a call, unless it takes too long: the store may be on the host that is lost."""
    results: list[Found] = []

    def work() -> None:
        with suppress(Exception):
            results.append(act())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def held_up_by(found: Mapping[int, Status], device: int, world: int) -> int | None:
    """The device that the others wait for, directly or through others.

    >>> statuses = {0: Status(0, "recv h0", 9.0, (1,)), 1: Status(1, "at load.py:3", 9.0)}
    >>> held_up_by(statuses, 0, 2), held_up_by({0: statuses[0]}, 0, 2)
    (1, 1)
    """
    silent = [one for one in range(world) if one not in found]
    busy = [one for one, status in found.items() if not status.peers and one != device]
    return next(iter(silent + busy), None)


def lines(found: Mapping[int, Status], culprit: int | None, world: int) -> Iterator[str]:
    """What every device does: first the one that the others wait for."""
    first = [] if culprit is None else [culprit]
    for device in [*first, *(one for one in range(world) if one not in first)]:
        status = found.get(device)
        if status is None:
            yield f"device {device} does not answer: it ended or was stopped, or its host is down"
        elif status.peers:
            peers = amount(len(status.peers), "device")
            names = "device " * (len(status.peers) == 1) or "devices "
            listed = names + ", ".join(map(str, status.peers))
            whom = listed if len(status.peers) <= 4 else peers
            yield f"device {device} has waited {status.seconds:.0f} s for {whom}: {status.what}"
        else:
            since = f"{status.what} for {status.seconds:.0f} s"
            yield f"device {device} waits for no other device: it has been {since}"
