"""What exchange threads and handles do when something goes wrong."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piper.plan.instructions import Recv
from piper.runtime.comm.exchange_thread import ExchangeThread
from piper.runtime.execute import Program


def failing() -> None:
    raise ValueError("the counts are wrong")


def test_after_a_task_that_failed_nothing_more_is_sent() -> None:
    thread, sent = ExchangeThread("ep"), []

    first, second = thread.submit(failing), thread.submit(lambda: sent.append("rows"))

    with pytest.raises(ValueError, match="the counts are wrong"):
        first.wait()
    with pytest.raises(ConnectionError, match="an earlier message failed: the counts are wrong"):
        second.wait()
    assert not sent
    thread.close()


def test_rows_do_not_live_until_the_next_task() -> None:
    thread = ExchangeThread("ep")
    rows = torch.zeros(3)
    seen, task = weakref.ref(rows), thread.submit(rows.sum)
    task.wait()
    del rows, task
    for _ in range(100):  # until the thread has gone on
        gc.collect()
        if seen() is None:
            break
        time.sleep(0.02)

    assert seen() is None
    thread.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("counts"), ValueError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (RuntimeError("Connection closed by peer"), ConnectionError),
    ],
)
def test_only_what_others_do_is_a_lost_peer(error: Exception, kind: type[Exception]) -> None:
    handle: Future[Any] = Future()
    handle.set_exception(error)
    waiting = SimpleNamespace(wait=handle.result)
    recv = Recv(node="recv x", value="x", shapes=(), peer=1, stream="pp")
    program = SimpleNamespace(
        handles=[waiting],
        plan=SimpleNamespace(instructions=[recv]),
        arrival=lambda k, one: one.wait(),
    )
    wait_one: Callable[[Any, int], None] = Program.wait_one

    with pytest.raises(kind) as met:
        wait_one(program, 0)
    assert type(met.value) is kind
