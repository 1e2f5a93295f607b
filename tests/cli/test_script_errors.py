"""An error of the user's script is shown with the user's lines, in every command."""

from __future__ import annotations

import logging
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from piper import __version__
from piper.cli import app, main
from piper.errors import PiperError, ScriptFailed
from piper.launcher.child import QUIET, log_progress
from piper.launcher.script_errors import shortened

TYPO = """import torch


def build():
    return torch.nn.Linear(3, siez)


build()
"""
INSIDE = """import torch


def multiply(x):
    return torch.nn.functional.linear(x, torch.ones(2, 7))


multiply(torch.ones(3, 3))
"""


@pytest.mark.parametrize("command", ["show", "check", "simulate", "view"])
def test_a_typo_is_shown_with_the_users_lines_only(command: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TYPO)

    found = CliRunner().invoke(app, [command, str(script)])

    assert isinstance(found.exception, ScriptFailed)
    lines = str(found.exception).splitlines()
    assert lines[0] == f"{script} failed"
    assert lines[-1] == "NameError: name 'siez' is not defined"
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{script}", line 8, in <module>',
        f'  File "{script}", line 5, in build',
    ]
    assert len(lines) <= 9


HABITS = """from piper import Trainer
from piper.job.programs.evaluation import Evaluation
from piper.runtime.metrics import Metrics, Readings

metrics = Metrics(1, 2, 8, lambda: Readings(2.0, 1.0, 0.5, 0.25))
print({habit})
"""


@pytest.mark.parametrize(
    ("habit", "last"),
    [
        ("metrics.los", "AttributeError: 'Metrics' object has no attribute 'los'. "
         "Did you mean: 'loss'?"),
        ("metrisc.loss", "NameError: name 'metrisc' is not defined. Did you mean: 'metrics'?"),
        ("metrics.loss.backward()", "  fix: leave it out: a step of the Trainer includes the "
         "backward and the optimizer's step"),
        ("metrics.loss.cpu()", "  fix: leave out .cpu(): it is a number of Python already"),
        ("metrics.loss.colour", "AttributeError: 'float' object has no attribute 'colour'"),
        ("metrics.item()", "  fix: write .loss, which is a number of Python"),
        ("Evaluation(2.0, 1, 2, 8, 0.5)['loss']", "  fix: write .loss, or .perplexity: they are "
         "attributes"),
        ("metrics['loss']['a']", "TypeError: 'float' object is not subscriptable"),
        ("Trainer.evaluate(None, 1, 2)", "  fix: it takes batches: write "
         "trainer.evaluate([(x, y)])"),
        ("object.__new__(Trainer)(1)", "  fix: write trainer.step(batch), or "
         "trainer.predict(*inputs) for outputs in eval mode"),
        ("object.__new__(Trainer).zero_grad()", "  fix: leave it out: trainer.step includes "
         "zero_grad, the backward and the optimizer's step"),
    ],
)  # fmt: skip
def test_usual_mistakes_say_what_to_write(habit: str, last: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HABITS.format(habit=habit))

    found = CliRunner().invoke(app, ["check", str(script)])

    assert str(found.exception).splitlines()[-1] == last


MADE = """import piper, torch

model = torch.nn.Linear(3, 3)
x = torch.ones(4, 3)
made = torch.optim.SGD(model.parameters())
piper.Trainer(model, torch.nn.functional.mse_loss, example=(x, x), optimizer=made)
"""


def test_the_line_is_the_users_and_not_one_that_python_generated(tmp_path: Path) -> None:
    """The options are a dataclass, whose `__init__` is in the file `<string>`."""
    script = tmp_path / "train.py"
    script.write_text(MADE)

    found = CliRunner().invoke(app, ["check", str(script)])

    assert isinstance(found.exception, PiperError)
    assert found.exception.place.strip().startswith(f"at {script}:6: piper.Trainer(")


@pytest.mark.parametrize("words", [[], ["run"], ["simulate"], ["schedule"], ["checkpoint", "show"]])
def test_flags_have_no_type_in_the_help(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"]).output

    assert "--help" in shown and "bool" not in shown.lower()


MISSING = """import piper, torch

piper.Trainer(torch.nn.Linear(3, 3), torch.nn.functional.mse_loss)
"""
TEXT = """Trainer: example= is missing
  fix: write example=(x, y): one batch as `step` gets it
  at {script}:3: piper.Trainer(torch.nn.Linear(3, 3), torch.nn.functional.mse_loss)"""


@pytest.mark.parametrize("command", ["show", pytest.param("run", marks=pytest.mark.processes)])
def test_an_error_of_piper_names_the_line_of_the_script(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MISSING)
    monkeypatch.setattr(sys, "argv", ["piper", command, str(script)])

    with pytest.raises(SystemExit):
        main()

    told = textwrap.dedent(
        capfd.readouterr().err.removeprefix("piper: ").removeprefix("device 0 failed\n")
    )
    assert told.strip() == TEXT.format(script=script)


def test_the_line_of_a_library_that_failed_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(INSIDE)

    found = CliRunner().invoke(app, ["show", str(script)])

    files = [line for line in str(found.exception).splitlines() if line.startswith("  File")]
    assert all(str(script) in line for line in files[:2]) and len(files) <= 3


def test_causes_are_shortened_too() -> None:
    try:
        try:
            CliRunner().invoke(app, ["--version"], catch_exceptions=False)
            raise KeyError("a")
        except KeyError as error:
            raise ValueError("b") from error
    except ValueError as error:
        text = shortened(error)

    assert "KeyError: 'a'" in text and text.endswith("ValueError: b")


def test_the_version_is_shown() -> None:
    found = CliRunner().invoke(app, ["--version"])

    assert (found.exit_code, found.output) == (0, f"piper {__version__}\n")


def test_shells_can_complete_commands() -> None:
    found = CliRunner().invoke(app, ["--help"])

    assert "--install-completion" in found.output


def test_main_prints_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("1 / 0\n")
    monkeypatch.setattr("sys.argv", ["piper", "show", str(script)])

    with pytest.raises(SystemExit) as left:
        main()

    assert left.value.code == 1
    assert capsys.readouterr().err.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(("quiet", "shown"), [({}, 1), ({QUIET: "1"}, 0)])
def test_a_quiet_run_logs_nothing(
    quiet: dict[str, str], shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("piper")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.delenv(QUIET, raising=False)
    for name, value in {"RANK": "0", **quiet}.items():
        monkeypatch.setenv(name, value)

    log_progress()

    shows = [one for one in log.handlers if not isinstance(one, logging.NullHandler)]
    assert len(shows) == shown and log.handlers, "without any, Python prints warnings"


def test_quiet_reaches_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, given = tmp_path / "train.py", []
    script.write_text("")
    monkeypatch.setattr("piper.cli.run.run_local", lambda *args: given.append(args[3]) or 0)

    for arguments in ([], ["--quiet"]):
        CliRunner().invoke(app, ["run", *arguments, str(script)], catch_exceptions=False)

    assert [QUIET in environment for environment in given] == [False, True]
