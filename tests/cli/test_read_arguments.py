"""Arguments that a script does not read: the command says so."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from piper.cli import app
from piper.cli.read_arguments import WatchedArguments

SCRIPT = """
import torch, piper
x = torch.zeros(2, 4)
piper.Trainer(torch.nn.Linear(4, 4), torch.nn.functional.mse_loss, example=(x, x))
"""
READS: dict[str, Callable[[list[str]], Any]] = {
    "the rest": lambda argv: argv[1:],
    "the last": lambda argv: argv[-1],
    "each": lambda argv: [*argv],
    "how many": len,
    "whether one is there": lambda argv: "--lr" in argv,
    "a copy": lambda argv: argv.copy(),
    "a place": lambda argv: argv.index("--lr"),
}


@pytest.mark.parametrize("name", READS)
def test_every_way_to_read_arguments_is_noticed(name: str) -> None:
    plain, watched = ["train.py", "--lr", "1"], WatchedArguments(["train.py", "--lr", "1"])

    assert READS[name](watched) == READS[name](plain)

    assert watched.was_read


def test_the_name_of_the_script_is_no_argument() -> None:
    watched = WatchedArguments(["train.py", "--lr", "1"])

    watched[0] = watched[0].upper()

    assert not watched.was_read
    assert pickle.loads(pickle.dumps(watched)) == ["TRAIN.PY", "--lr", "1"]
    assert not watched.was_read


@pytest.mark.parametrize("command", ["show", "check", "simulate"])
def test_a_command_warns_of_arguments_that_its_script_does_not_read(
    command: str, tmp_path: Path
) -> None:
    reads, unread = tmp_path / "reads.py", tmp_path / f"{command}.py"  # warned of once
    reads.write_text(f"import sys\nprint(sys.argv[1:])\n{SCRIPT}")
    unread.write_text(SCRIPT)

    found = {
        (script, *words): CliRunner().invoke(app, [command, str(script), *words]).stderr
        for script, *words in ((unread,), (unread, "--lr", "1"), (reads, "--lr", "1"))
    }

    assert found == {
        (unread,): "",
        (unread, "--lr", "1"): f"piper: {command}.py made its Trainer without reading its "
        "arguments, --lr 1: does it read them, as with argparse?\n",
        (reads, "--lr", "1"): "",
    }
