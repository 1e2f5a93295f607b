"""A script that ends without `trainer.close()` loses nothing, and fails if something is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
TRAIN = """
import os, sys, time
import torch
import piper
import piper.runtime.checkpoint.checkpoints as checkpoints

written = checkpoints.write

def slowly(*given):
    time.sleep(1)  # until the script is over
    if os.environ["RANK"] == sys.argv[1]:
        raise OSError(28, "No space left on device")
    written(*given)

checkpoints.write = slowly

def main():
    torch.manual_seed(0)
    x, net = torch.ones(4, 4), torch.nn.Linear(4, 4)
    trainer = piper.Trainer(
        net, torch.nn.functional.mse_loss, piper.strategies.gpipe(pp=1, dp=2, microbatches=2),
        example=(x, x), device="cpu",
    )
    trainer.step(x, x)
    trainer.save("run", wait=False)

main()
"""


def run(folder: Path, full: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "piper", "run", "train.py", "-n", "2", full]
    return subprocess.run(
        command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip


def test_torchrun_ends_with_the_threads_of_gloo(tmp_path: Path) -> None:
    """One that frees a tensor when Python is gone aborts the process: about every tenth run did."""
    first = "import atexit, torch.distributed as dist\n"
    first += "atexit.register(lambda: print('open' if dist.is_initialized() else 'left'))\n"
    (tmp_path / "train.py").write_text(first + TRAIN)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "nowhere"]
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout.split()) == (0, ["left", "left"]), done.stderr


def test_a_save_is_finished(tmp_path: Path) -> None:
    done = run(tmp_path, "nowhere")

    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "piper.json").read_text())


def test_a_save_that_fails_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "1")

    assert done.returncode == 1
    assert "piper: device 1 failed" in done.stderr and "No space left on device" in done.stderr


def test_the_last_metrics_are_written() -> None:
    """On a GPU they would wait for the next step."""
    from piper.job.loop.closing import Closing
    from piper.job.loop.metric_log import Function, MetricLog

    class Trainer(Closing):
        def __init__(self) -> None:
            self.log = MetricLog([Function(found.append)])
            self._close_at_exit(self.log)

    found: list[object] = []
    trainer, last = Trainer(), Namespace(read=lambda: None)
    trainer.log.add(last, over=False)  # type: ignore[arg-type]
    assert found == []
    del trainer

    assert len(found) == 1 and found[0] is last
