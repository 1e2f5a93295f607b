"""`piper.launch` runs a function in several processes, from a script, a notebook or a thread."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from launched import fail_on_the_second, rank_and

import piper
from piper.errors import InputError, LaunchError
from piper.launcher import call

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

TRAIN = """
import torch
import piper

class Found:
    def __init__(self, losses):
        self.losses = losses

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

def data(replica):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(replica))

def train(steps, lr):
    x, loss_fn = data(0), torch.nn.functional.mse_loss
    trainer = piper.Trainer(
        net(), loss_fn, piper.strategies.gpipe(pp=1, dp=2, zero=3, microbatches=2),
        example=(x, x), optimizer=lambda named: torch.optim.SGD(named, lr=lr), device="cpu",
    )
    x = data(trainer.replica)
    return Found([trainer.step(x, x).loss for _ in range(steps)])

def plain(steps, lr):
    model, x = net(), torch.cat([data(0), data(1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        yield loss.item()
"""
LAUNCH = """
    results = piper.launch(train, 2, 3, lr=0.5)
    assert all(type(one) is Found for one in results) or not "__file__" in globals()
    for one in results:
        torch.testing.assert_close(one.losses, list(plain(3, 0.5)))
    print("same", len(results))
"""


BY_VALUE = """
import os
from dataclasses import dataclass
import piper

@dataclass
class Found:
    rank: str
    more: int

def add(a, b):
    return Found(os.environ["RANK"], a + b)

print(piper.launch(add, 2, 2, b=3))
"""


def python(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, input=given, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip


@pytest.mark.soak
def test_a_script_trains_as_plain_pytorch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f'{TRAIN}\nif __name__ == "__main__":{LAUNCH}')

    done = python(str(script))

    assert done.stdout.endswith("same 2\n"), done.stderr


def test_code_without_a_file_is_sent_by_value() -> None:
    """As in a notebook: what it defines cannot be imported."""
    done = python("-", given=BY_VALUE)

    assert done.stdout == "[Found(rank='0', more=5), Found(rank='1', more=5)]\n", done.stderr


@pytest.mark.soak
def test_code_without_a_file_trains() -> None:
    done = python("-", given=f"{TRAIN}\nif True:{LAUNCH}")

    assert done.stdout.endswith("same 2\n"), done.stderr


@pytest.mark.soak
def test_a_notebook_trains(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    rehearse = (
        "x = data(0)\n"
        "strategy = piper.strategies.one_f_one_b(pp=2, microbatches=2)\n"
        "done = piper.rehearse(net(), torch.nn.functional.mse_loss, strategy, [(x, x)])\n"
        "len(done.losses)"
    )
    sources = (TRAIN, f"if True:{LAUNCH}", rehearse, "strategy")
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)

    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()

    said = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert "same 2" in said[1]
    assert notebook.cells[2].outputs[-1]["data"]["text/plain"] == "1"
    assert notebook.cells[3].outputs[-1]["data"]["text/html"].startswith("<div")


def test_results_come_by_rank_also_in_a_thread() -> None:
    found: list[object] = []
    thread = Thread(target=lambda: found.extend(piper.launch(rank_and, 3, 7, 8)))
    thread.start()
    thread.join()

    assert found == [(0, 7, 8), (1, 7, 8), (2, 7, 8)]


def test_a_failure_names_the_device_and_the_line() -> None:
    with pytest.raises(LaunchError, match="device 1 failed") as found:
        piper.launch(fail_on_the_second, 2)

    assert 'raise ValueError("no more data")' in str(found.value)


WAIT = """
import json, os, pathlib, sys, time
import piper

def wait(folder):
    pathlib.Path(folder, os.environ["RANK"]).write_text(json.dumps(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    try:
        piper.launch(wait, 2, sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    script, folder = tmp_path / "wait.py", tmp_path / "ranks"
    script.write_text(WAIT)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder)]
    running = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while len([one for one in folder.iterdir() if one.read_text()]) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)

    running.send_signal(signal.SIGINT)

    assert running.communicate(timeout=30)[0] == "interrupted\n"
    for file in folder.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(file.read_text()), 0)


def test_a_script_without_a_guard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes import it, and reach the call again."""
    monkeypatch.setenv("RANK", "0")

    with pytest.raises(InputError, match='write `if __name__ == "__main__":` above the call'):
        piper.launch(rank_and, 1)


@pytest.mark.parametrize(
    ("fn", "n", "text"),
    [
        ("train", 2, "'train' is not a function"),
        (rank_and, 0, "0 is not a number of processes"),
        (rank_and, True, "True is not a number of processes"),
        (lambda: 1, 1, "cannot be sent"),
    ],
)
def test_what_cannot_be_launched_is_told(fn: object, n: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        piper.launch(fn, n)  # type: ignore[arg-type]


def test_a_notebook_without_cloudpickle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "BY_VALUE", ("no_such_module",))

    with pytest.raises(InputError, match="needs cloudpickle"):
        call.pickler(by_value=True)
