"""torchrun on several nodes: two launchers of one machine stand for two hosts."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from piper.launch.local import free_port

TESTS = Path(__file__).parent.parent
SCRIPT = TESTS / "scripts" / "two_stages.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def node(rank: int, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port),
            str(SCRIPT), "--fail", "1",
        ],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[tuple[int, str, str, float]]]:
    """Of each of two nodes: exit code, what it printed, and when it was over.

    They train together; then the process of the second one fails, and the first one goes on.
    """
    port = free_port()
    started = [node(rank, port) for rank in range(2)]
    try:
        second = (*reversed(started[1].communicate(timeout=180)), time.monotonic())
        first = (*reversed(started[0].communicate(timeout=180)), time.monotonic())
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    yield [(codes[0], *first), (codes[1], *second)]


def test_two_nodes_train_like_plain_pytorch(nodes: list[tuple[int, str, str, float]]) -> None:
    expected = runpy.run_path(str(SCRIPT))["plain"]()

    for _, error, output, _ in nodes:
        lines = [line for line in output.splitlines() if " loss " in line]
        assert [float(line.split()[-1]) for line in lines] == pytest.approx(expected), error


def test_a_failure_on_one_node_ends_both_in_seconds_and_says_why(
    nodes: list[tuple[int, str, str, float]],
) -> None:
    (survivor, symptom, _, ended_later), (failed, reason, _, ended) = nodes

    assert survivor != 0 and failed != 0
    assert "ValueError: this device has had enough" in reason
    assert "PeerLost: device 0 stopped at" in symptom
    assert ended_later - ended < 10
