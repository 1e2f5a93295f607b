"""The recipes in examples/ compile, train for a few steps, and resume."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from piper.cli.target import inspect

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_recipe_for_vision_compiles() -> None:
    found = inspect(EXAMPLES / "vision.py", ["--dp", "3"])

    assert len(found.compiled.device_plans) == 3


def run(script: str, processes: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "piper", "run", str(EXAMPLES / script), "-n", str(processes)]
    found = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.soak
@pytest.mark.parametrize("script", ["vision.py", "fine_tune.py"])
def test_a_recipe_trains_logs_saves_resumes_and_evaluates(script: str, tmp_path: Path) -> None:
    log, folder = tmp_path / "a.csv", tmp_path / "saved"
    given = ("--log", str(log), "--checkpoint", str(folder))

    first = run(script, 2, "--steps", "25", *given)
    again = run(script, 2, "--steps", "27", *given)

    assert "held out: loss" in first and "held out: loss" in again
    rows = list(csv.DictReader(log.open()))
    steps = [int(row["step"]) for row in rows]
    assert steps[:25] == list(range(1, 26)) and steps[-1] == 27
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


@pytest.mark.soak
def test_a_recipe_writes_a_model_that_it_can_read(tmp_path: Path) -> None:
    run("fine_tune.py", 2, "--steps", "2", "--output", str(tmp_path / "a"))

    text = run("fine_tune.py", 2, "--steps", "1", "--model", str(tmp_path / "a"), "--pp", "2",
               "--dp", "1")  # fmt: skip

    assert "held out: loss" in text
