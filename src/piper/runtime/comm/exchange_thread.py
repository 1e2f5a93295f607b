"""A thread that runs tasks in order on one stream, while compute goes on.

A token all-to-all is two messages: counts, then rows. So is a value whose size depends on data:
sizes, then the value. The second message needs what the first one brought. This thread waits in
between, so that the thread that computes does not have to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any


@dataclass(slots=True)
class Task:
    """A job for an exchange thread, and its result once it is done."""

    job: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)

    def wait(self) -> Any:
        return self.done.result()


class ExchangeThread:
    """Runs tasks one after the other. A daemon thread, so it never keeps the process alive."""

    def __init__(self, name: str) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.closed = False
        self.failed: BaseException | None = None
        threading.Thread(target=self.work, name=f"piper {name}", daemon=True).start()

    def submit(self, job: Callable[[], Any]) -> Task:
        if self.closed:
            raise ConnectionError("the communicators of this Trainer are closed")
        task = Task(job)
        self.tasks.put(task)
        return task

    def work(self) -> None:
        while (task := self.tasks.get()) is not None:
            self.run(task)
            del task  # otherwise its rows live until the next task arrives

    def run(self, task: Task) -> None:
        """Send nothing after a failure: peers would take the next message for the missing one."""
        if self.failed is not None:
            task.done.set_exception(ConnectionError(f"an earlier message failed: {self.failed}"))
            return
        try:
            task.done.set_result(task.job())
        except BaseException as error:  # noqa: BLE001 (raised again in `wait`)
            self.failed = error
            task.done.set_exception(error)

    def close(self) -> None:
        self.closed = True
        self.tasks.put(None)
