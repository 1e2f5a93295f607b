"""torchrun on several nodes: two launchers of one machine stand for two hosts.

They are started by the SLURM script of docs/cluster.md, with stand-ins for SLURM's commands.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piper.launcher.local import free_port

pytestmark = [pytest.mark.processes, pytest.mark.soak]
TESTS = Path(__file__).parent.parent
SCRIPT = TESTS / "scripts" / "two_stages.py"
STAND_INS = {
    "scontrol": "echo 127.0.0.1; echo somewhere-else",
    "srun": """
while [[ $1 == -* ]]; do shift; done
for node in 0 1; do
  (SLURM_NODEID=$node "$@" >$node.out 2>$node.err; echo $? >$node.code) &
done
wait
""",
}


def job_of_the_page() -> str:
    """One device per node, where the page has eight."""
    (found,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page(), re.DOTALL)
    job = found.replace("--nproc-per-node 8", "--nproc-per-node 1")
    return job.replace("  train.py'", f"  {SCRIPT} --fail 1'")


def page() -> str:
    return (TESTS.parent / "docs" / "cluster.md").read_text()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the output, the errors and the exit code of each of two nodes.

    They train together; then the process of the second one fails, and the first one goes on.
    """
    folder = tmp_path_factory.mktemp("nodes")
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(TESTS.parent / "src"), "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "all", "SLURM_NNODES": "2",
    }  # fmt: skip
    job = subprocess.Popen(
        ["bash", "-c", job_of_the_page()], cwd=folder, env=environment, start_new_session=True
    )
    try:
        job.wait(timeout=180)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return folder


def test_two_nodes_train_like_plain_pytorch(nodes: Path) -> None:
    expected = runpy.run_path(str(SCRIPT))["plain"]()

    for node in range(2):
        lines = [x for x in (nodes / f"{node}.out").read_text().splitlines() if " loss " in x]
        errors = (nodes / f"{node}.err").read_text()
        assert [float(line.split()[-1]) for line in lines] == pytest.approx(expected), errors


def test_a_failure_on_one_node_ends_both_in_seconds_and_says_why(nodes: Path) -> None:
    codes = [nodes / f"{node}.code" for node in range(2)]

    assert [int(code.read_text()) for code in codes] == [1, 1]
    assert "ValueError: this device has had enough" in (nodes / "1.err").read_text()
    assert "PeerLost: device 0 " in (nodes / "0.err").read_text()
    assert abs(codes[0].stat().st_mtime - codes[1].stat().st_mtime) < 15
