"""Every block of code on every page runs.

Blocks that begin with >>> are run by pytest. Others run here, in the order of their page, with the
names that a reader has by then. A block that cannot run says why: `<!-- not run: ... -->`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

import piper
from piper.cli import app
from piper.cli.target import inspect

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n+)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINES = re.compile(r"^```[a-z]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.router(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("L"):
                x = layer(x)
        return self.head(x)


def code(page: Path) -> list[str]:
    found = BLOCK.findall(page.read_text())
    return [text for reason, text in found if not reason and not text.startswith(">>>")]


def blocks(page: Path) -> list[str]:
    """Parts of a script. They run in this process."""
    return [text for text in code(page) if not re.match(r"# \w+\.py\n", text)]


def scripts(page: Path) -> dict[str, str]:
    """Blocks that begin with the name of a script."""
    named = (text for text in code(page) if re.match(r"# \w+\.py\n", text))
    return {text.split()[1]: text for text in named}


SCRIPTS = {
    f"{page.name}:{name}": text
    for page in PAGES
    for name, text in scripts(page).items()
    if "import piper" in text
}


def known(page: Path) -> dict[str, Any]:
    """What a reader of a page has before its first line of code."""
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    found: dict[str, Any] = {name: getattr(piper, name) for name in piper.__all__}
    found |= {"piper": piper, "torch": torch, "partial": partial, "islice": islice}
    found |= {"signal": signal, "x": x, "y": y, "tokens": x, "labels": y, "batch": (x, y)}
    found |= {"loader": [(x, y)] * 8, "held_out": [(x, y)], "strategy": None, "model": Net()}
    found["loss_fn"] = nn.functional.mse_loss
    found["optimizer"] = torch.optim.SGD(found["model"].parameters(), lr=0.1)
    return found | {"__name__": "a page"}


def language_model(_: dict[str, Any]) -> dict[str, Any]:
    """A folder with a model, as `hf download` leaves it, and batches for it."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    tokens = torch.randint(0, 64, (2, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    return {"batch": batch, "loader": [batch] * 2}


def with_trainer(names: dict[str, Any]) -> dict[str, Any]:
    given = names["model"], names["loss_fn"]
    return {"trainer": piper.Trainer(*given, example=names["batch"], device="cpu")}


MORE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hugging_face.md": language_model, "trace.md": with_trainer, "failures.md": with_trainer,
}  # fmt: skip


@pytest.fixture
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
@pytest.mark.usefixtures("signals")
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = known(page)
    names |= MORE.get(page.name, lambda _: {})(names)
    for number, text in enumerate(blocks(page), start=1):
        exec(compile(dedent(text), f"{page.name}, block {number}", "exec"), names)


def prepared(name: str, tmp_path: Path) -> Path:
    """A script as a file, in a folder with what it reads."""
    script = tmp_path / name.split(":")[1]
    script.write_text(SCRIPTS[name])
    if "llama" in SCRIPTS[name]:
        Path("text.txt").write_text((ROOT / "README.md").read_text() * 3)
        exec(scripts(ROOT / "docs" / "start.md")["make_llama.py"], {})
    return script


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    found = inspect(prepared(name, tmp_path), [])

    assert len(found.compiled.device_plans) == 2


def test_the_plan_of_its_page_is_that_of_the_first_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = SCRIPTS["start.md:train.py"]
    script.write_text(text.replace("microbatches=8", "microbatches=2"))

    plan = str(inspect(script, []).compiled.device_plans[0])

    assert f"```text\n{plan}\n```" in (ROOT / "docs" / "plan.md").read_text()


def test_the_idle_time_of_its_page_is_that_of_the_first_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS["start.md:train.py"])

    shown = CliRunner().invoke(app, ["show", str(script)]).output

    found = re.search(r"idle (\d+ %) \((\d+ %) bubble, (\d+ %) exposed communication\)", shown)
    text = " ".join((ROOT / "docs" / "start.md").read_text().split())
    told = re.search(r"idle for (\d+ %) of the step: for (\d+ %) .*? for (\d+ %) for mess", text)
    assert found is not None and told is not None
    assert told.groups() == found.groups()


@pytest.mark.soak
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "piper", "run", str(prepared(name, tmp_path)), "-n", "2"]
    source = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    done = subprocess.run(command, env=source, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    losses = [float(one) for one in re.findall(r"loss: ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 0.1


def test_the_reasons_are_few() -> None:
    reasons = [reason for page in PAGES for reason, _ in BLOCK.findall(page.read_text()) if reason]

    assert len(reasons) <= 3


def commands(page: Path) -> list[list[str]]:
    """The lines that run piper, without what follows a script's name."""
    lines = [line for block in LINES.findall(page.read_text()) for line in block.splitlines()]
    words = [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines
             if re.match(r"\s*(\$ )?piper \w", line)]  # fmt: skip
    return [found for found in words if found[1] != "0.1.0"]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: page.name
)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    """Options after a script's name may be the script's own."""
    group: Any = typer.main.get_command(app)

    for _, name, *rest in commands(page):
        assert name in group.commands, f"{page.name}: piper {name}"
        one = group.commands[name]
        options = {text for option in one.params for text in (*option.opts, *option.secondary_opts)}
        script = next((k for k, word in enumerate(rest) if word.endswith(".py")), len(rest))
        for word in rest[:script]:
            assert not word.startswith("-") or word.split("=")[0] in options, (
                page.name,
                name,
                word,
            )
