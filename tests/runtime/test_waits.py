"""A process that waits too long says who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from piper.errors import PeerLost
from piper.plan.instructions import Plan, Recv, Run
from piper.runtime.plan_values import waited_for
from piper.runtime.processes import arrivals, waits
from piper.runtime.processes.activity import Activity, Status, activity, main_thread_text, waiting
from piper.runtime.processes.waits import Board, held_up_by, lines, lost

LATE = timedelta(seconds=0.02)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    found = Board(dist.HashStore(), 0, 3, LATE)
    monkeypatch.setattr(waits, "_board", found)
    monkeypatch.setattr(waits, "ANSWER", 0.3)
    monkeypatch.setattr(waits, "POLL", 0.01)
    yield found
    found.ended.set()


def answering(board: Board, device: int, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, which says this when it is asked."""
    other = Board(board.store, device, board.world, board.patience, board.ended)

    def post() -> None:
        text = waits.json.dumps(status.to_json())
        board.store.set(waits.key(device), text)

    monkeypatch.setattr(other, "post", post, raising=False)
    threading.Thread(target=other.answer, daemon=True).start()


def test_a_device_that_does_not_answer_is_named(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(board, 1, Status(1, "recv h1 from 2 on pp, for PP1:B@0", 9.0, (2,)), monkeypatch)
    with waiting("recv h0 from 1 on pp, for PP0:B@0", (0, 1)):
        time.sleep(0.03)

        error = lost(0, "run PP0:B@0", "Timed out waiting")

    assert error.culprit == 2
    assert str(error) == (
        "device 0 waited in vain for device 2, at run PP0:B@0\n"
        "  device 2 does not answer: it ended or was stopped, or its host is down\n"
        "  device 0 has waited 0 s for device 1: recv h0 from 1 on pp, for PP0:B@0\n"
        "  device 1 has waited 9 s for device 2: recv h1 from 2 on pp, for PP1:B@0"
    )


def test_a_device_that_works_by_itself_is_named(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(board, 1, Status(1, "at train.py:7 (load)", 5.0), monkeypatch)
    answering(board, 2, Status(2, "the start of step", 5.0, (0, 1)), monkeypatch)
    with waiting("the start of step", (0, 1, 2)):
        time.sleep(0.03)

        error = lost(0, "the start of step", "Timed out waiting")

    assert error.culprit == 1
    assert str(error).startswith(
        "device 0 waited in vain for device 1, at the start of step\n"
        "  device 1 waits for no other device: it has been at train.py:7 (load) for 5 s\n"
    )


def test_a_peer_that_is_gone_at_once_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_board", Board(dist.HashStore(), 0, 3, timedelta(hours=1)))
    with waiting("recv h0", (1,)):
        error = lost(0, "recv h0", "Connection closed by peer")

    assert error.culprit is None
    assert "Connection closed by peer" in str(error)


def test_a_store_that_is_gone_does_not_block(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "ask", lambda: time.sleep(60), raising=False)
    with waiting("recv h0", (1,)):
        time.sleep(0.03)
        began = time.monotonic()

        error = lost(0, "recv h0", "Timed out waiting")

    assert time.monotonic() - began < 5
    assert error.culprit is None


def test_everybody_waits_for_somebody() -> None:
    ring = {0: Status(0, "recv", 1.0, (1,)), 1: Status(1, "recv", 1.0, (0,))}

    assert held_up_by(ring, 0, 2) is None
    assert list(lines(ring, None, 2)) == [
        "device 0 has waited 1 s for device 1: recv",
        "device 1 has waited 1 s for device 0: recv",
    ]


def test_a_wait_names_the_message_its_reader_and_the_peer() -> None:
    recv = Recv("recv h0", "h0", (((2, 4), "float32"),), 1, "pp")
    run = Run("PP1:F@0", "PP1", "F", ("h0",), ("h1",), waits=(0,))

    assert waited_for(Plan(0, (), (recv, run)), 0, 1) == (
        "recv    h0 from 1 on pp, for PP1:F@0",
        (1, 0),
    )


def test_marks_of_waits_end_with_them() -> None:
    with waiting("something", (0, 1)):
        assert activity.status(0) == Status(0, "something", pytest.approx(0, abs=5), (1,))

    assert activity.status(0).peers == ()
    assert __name__.rpartition(".")[2] in main_thread_text()
    assert Activity().wait is None


def test_a_device_that_never_comes_is_named() -> None:
    with pytest.raises(PeerLost, match="device 1 has made no Trainer in 0 s") as error:
        arrivals.wait_for_all(dist.HashStore(), 0, 2, 0.01)

    assert error.value.culprit == 1


def test_a_device_that_ended_before_it_came_is_named_at_once(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPER_STORE", f"{tmp_path}/store")
    (arrivals.Path(str(tmp_path)) / "ended-1").touch()

    with pytest.raises(PeerLost, match="device 1 reached the end of its script") as error:
        arrivals.wait_for_all(dist.HashStore(), 0, 2, 600)

    assert error.value.culprit == 1
