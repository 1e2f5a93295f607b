"""The recipes in examples/ compile, train for a few steps, and resume."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

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


ENTRIES = {
    "train.log=tensorboard": "tensorboard",
    "train.log=wandb": "wandb",
    "train.log=runs/a.csv": "runs/a.csv",
    'train.log=["print", "a.csv"]': ["print", "a.csv"],
    "train.log=null": None,
    "train.checkpoint=2024": "2024",
    "train.checkpoint=false": "false",
    "train.checkpoint=-": "-",
    "train.lr=1e-4": 1e-4,
    "train.lr=.001": 0.001,
    "train.ema=null": None,
    "train.steps=10": 10,
    "data.file=text.txt": "text.txt",
    "data.file=2024.txt": "2024.txt",
    "data.file=[draft].txt": "[draft].txt",
    "data.file=a=b.txt": "a=b.txt",
    "strategy.schedule=1f1b": "1f1b",
    "strategy.schedule=zb-h1": "zb-h1",
    "strategy.remat=true": True,
    "strategy.remat=True": True,
    "strategy.remat=auto": "auto",
    'strategy.offload=["optimizer"]': ["optimizer"],
    "model.kind=llama": "llama",
    "model.layers=8": 8,
}


def config_of(monkeypatch: pytest.MonkeyPatch, *entries: str) -> dict[str, Any]:
    file = str(EXAMPLES / "pretrain_llama.toml")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--config", file, *entries])
    return importlib.import_module("pretrain").config()


def test_any_value_may_follow_the_file_as_one_types_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry, wanted in ENTRIES.items():
        section, name = entry.partition("=")[0].split(".")
        found = config_of(monkeypatch, entry)[section][name]
        assert (found, type(found)) == (wanted, type(wanted)), entry


@pytest.mark.parametrize("entry", ["train.step=10", "trian.steps=10", "train.steps", "steps=10"])
def test_an_entry_that_does_not_exist_is_refused(
    entry: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        config_of(monkeypatch, entry)

    assert f"{entry}: write one of these, with =value: model.kind, " in capsys.readouterr().err


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
