"""The recipes in examples/ compile, train for a few steps, and resume."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from draws import draws, every
from pool import run_on
from recipes import run_recipe

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: str, processes: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "piper", "run", str(EXAMPLES / script), "-n", str(processes)]
    found = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


RECIPES = {  # on two devices
    "vision.py": ["--dp", "2"],
    "fine_tune.py": ["--dp", "2"],
    "lora.py": ["--dp", "2"],
    "pretrain_mixture": ["strategy.pp=1", "strategy.dp=2", "strategy.ep=2"],
    "pretrain_llama": ["strategy.pp=2", "strategy.dp=1"],
    "lora.py --peft": ["--dp", "2", "--peft"],
}


def arguments(name: str, steps: int, folder: Path) -> list[str]:
    log, saved = str(folder / "a.csv"), str(folder / "saved")
    if ".py" in name:
        return [*RECIPES[name], "--steps", str(steps), "--log", log, "--checkpoint", saved]
    file = ["--config", str(EXAMPLES / f"{name}.toml"), *RECIPES[name]]
    return [*file, f"train.steps={steps}", f"train.log={log}", f"train.checkpoint={saved}"]


@pytest.mark.parametrize("name", every(len(RECIPES), RECIPES))
def test_a_recipe_trains_logs_saves_resumes_and_evaluates(name: str, tmp_path: Path) -> None:
    if "peft" in name:
        pytest.importorskip("peft", reason="pip install peft")
    script = name.split()[0] if ".py" in name else "pretrain.py"
    last = draws(3, 30)  # the step after which it is stopped

    first, _ = run_on(2, run_recipe, script, arguments(name, last, tmp_path))
    again, other = run_on(2, run_recipe, script, arguments(name, last + 2, tmp_path))

    assert "held out: loss" in first and "held out: loss" in again and not other
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, last + 3))
    assert last < 30 or float(rows[-1]["loss"]) < float(rows[0]["loss"])


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["llama", "mixture"])
def test_pretraining_runs_as_its_file_says(kind: str, tmp_path: Path) -> None:
    file = str(EXAMPLES / f"pretrain_{kind}.toml")

    found = run("pretrain.py", 4, "--config", file, "train.steps=2",
                f"train.checkpoint={tmp_path / 'saved'}")  # fmt: skip

    assert "held out: loss" in found


@pytest.mark.soak
def test_a_recipe_writes_a_model_that_it_can_read(tmp_path: Path) -> None:
    run("fine_tune.py", 2, "--steps", "2", "--output", str(tmp_path / "a"))

    text = run("fine_tune.py", 2, "--steps", "1", "--model", str(tmp_path / "a"), "--pp", "2",
               "--dp", "1")  # fmt: skip

    assert "held out: loss" in text
