"""The recipes in examples/ compile, train for a few steps, and resume."""

from __future__ import annotations

import csv
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from draws import every

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


ALONE = {
    "lora.py": ["--dp", "1", "--steps"],
    "pretrain_llama": ["strategy.pp=1", "strategy.dp=1"],
    "pretrain_mixture": ["strategy.pp=1", "strategy.dp=1", "strategy.ep=1"],
    "fine_tune.py": ["--dp", "1", "--steps"],
    "vision.py": ["--dp", "1", "--steps"],
}


def arguments(name: str, steps: int, folder: Path) -> list[str]:
    log, saved = str(folder / "a.csv"), str(folder / "saved")
    if name.endswith(".py"):
        return [*ALONE[name], str(steps), "--log", log, "--checkpoint", saved]
    file = ["--config", str(EXAMPLES / f"{name}.toml"), *ALONE[name]]
    return [*file, f"train.steps={steps}", f"train.log={log}", f"train.checkpoint={saved}"]


@pytest.mark.parametrize("name", every(4, ALONE))
def test_a_recipe_trains_on_one_device_and_evaluates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / (name if name.endswith(".py") else "pretrain.py")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments(name, 2, tmp_path)])

    runpy.run_path(str(script), run_name="__main__")

    assert "held out: loss" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [int(row["step"]) for row in rows] == [1, 2]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["llama", "mixture"])
def test_pretraining_resumes(kind: str, tmp_path: Path) -> None:
    given = ["--config", str(EXAMPLES / f"pretrain_{kind}.toml"), f"train.log={tmp_path / 'a.csv'}",
             f"train.checkpoint={tmp_path / 'saved'}", "train.save_every=20"]  # fmt: skip

    first = run("pretrain.py", 4, *given, "train.steps=20")
    again = run("pretrain.py", 4, *given, "train.steps=22")

    assert "held out: loss" in first and "held out: loss" in again
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 23))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


@pytest.mark.soak
@pytest.mark.parametrize("script", ["vision.py", "fine_tune.py", "lora.py"])
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
