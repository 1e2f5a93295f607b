"""A thread that does what is asked on one stream, in order, while compute goes on.

An exchange is two messages, of which the second needs what the first one brought; so is a value
whose size depends on data. Somebody must wait in between, and not the thread that computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any


@dataclass(slots=True)
class Errand:
    """Something that a courier does, or has done."""

    job: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)

    def wait(self) -> Any:
        return self.done.result()


class Courier:
    """Does errands one after the other. Its thread never keeps the process alive."""

    def __init__(self, name: str) -> None:
        self.errands: SimpleQueue[Errand | None] = SimpleQueue()
        self.closed = False
        self.failed: BaseException | None = None
        threading.Thread(target=self.work, name=f"piper {name}", daemon=True).start()

    def ask(self, job: Callable[[], Any]) -> Errand:
        if self.closed:
            raise ConnectionError("the communicators of this Trainer are closed")
        errand = Errand(job)
        self.errands.put(errand)
        return errand

    def work(self) -> None:
        while (errand := self.errands.get()) is not None:
            self.do(errand)
            del errand  # else its rows live until the next one comes

    def do(self, errand: Errand) -> None:
        """After one that failed nothing more is sent: others would take it for what they miss."""
        if self.failed is not None:
            errand.done.set_exception(ConnectionError(f"a message failed before: {self.failed}"))
            return
        try:
            errand.done.set_result(errand.job())
        except BaseException as error:  # noqa: BLE001 (whoever waits for it gets it)
            self.failed = error
            errand.done.set_exception(error)

    def close(self) -> None:
        self.closed = True
        self.errands.put(None)
