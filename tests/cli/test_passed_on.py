"""What a command does not know is for the script, unless it is a misspelled option of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from piper.cli import app
from piper.cli.passed_on import (
    Misspelled,
    PassesOn,
    Unknown,
    add_command,
    every_option,
    options_of,
)
from piper.errors import InputError, StrategyError
from piper.strategies import one_f_one_b

COMMANDS = {
    name: command
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    if isinstance(command, PassesOn)
}
ECHO = "import sys\nprint('got', *sys.argv[1:])\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(ECHO)
    return path


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def passed_on(*words: str) -> str:
    """What the script prints. It makes no Trainer, which is an error after it."""
    found = call(*words)
    assert isinstance(found.exception, StrategyError), found.output
    return str(found.output.strip())


def misspelled(option: str) -> list[str]:
    """Without its last letter, with that letter twice, with underscores, and in capitals."""
    words = [option + option[-1], option.replace("-", "_").replace("__", "--", 1), option.upper()]
    return [word for word in [*words, option[:-1]] if word != option and len(word) > 4]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelled_option_is_an_error(name: str, script: Path) -> None:
    known = options_of(COMMANDS[name])
    assert len(known) > 3
    for option in known:
        for word in set(misspelled(option)) - set(known):
            for words in ([str(script), word], [str(script), f"{word}=1"], [word, str(script)]):
                with pytest.raises(Misspelled, match=f"Did you mean {option}?"):
                    COMMANDS[name].make_context(name, words)


def test_a_target_that_is_still_a_text(script: Path) -> None:
    def show(target: str, hello: bool = False) -> None:
        """As in versions of typer that convert paths after the arguments are parsed."""

    app = typer.Typer()
    add_command(app, "show", show)
    with pytest.raises(Misspelled, match="Did you mean --hello"):
        typer.main.get_command(app).make_context("show", [str(script), "--helo"])


def test_the_message_of_a_misspelled_option(script: Path) -> None:
    found = call("check", str(script), "--numeric")

    assert found.exit_code == 2
    assert " ".join(found.output.replace("│", " ").split()).endswith(
        "no such option: --numeric. Did you mean --numerics? To pass it on to a script, write it "
        f"after `--`. ╰{78 * '─'}╯"
    )


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("word", ["--lr", "--lr=1", "-x"])
def test_before_the_target_an_option_must_be_one_of_the_command(
    name: str, word: str, script: Path
) -> None:
    known = ", ".join(every_option(COMMANDS[name]))
    with pytest.raises(Unknown) as found:
        COMMANDS[name].make_context(f"piper {name}", [word, "1", str(script)])

    assert found.value.message == (
        f"no such option: {word}. `piper {name}` has {known}. Options of a script are written "
        "after it."
    )


def test_before_the_target_values_are_no_options(script: Path) -> None:
    with pytest.raises(InputError, match="'-1' names no time steps"):
        CliRunner().invoke(app, ["show", "--steps", "-1", str(script)], catch_exceptions=False)
    assert (
        passed_on("simulate", "--device=cpu", "-o", "a.json", "--", str(script), "-o") == "got -o"
    )
    assert COMMANDS["run"].make_context("run", ["-n4", "-q", str(script)]).params["processes"] == 4


def test_an_option_of_the_script_is_passed_on(script: Path) -> None:
    assert passed_on("check", str(script), "--lr", "1", "-x") == "got --lr 1 -x"
    assert passed_on("check", str(script), "--", "--numeric") == "got --numeric"
    script.write_text(f"{ECHO}OPTION = '--numeric'\n")
    assert passed_on("check", str(script), "--numeric", "--lr=2") == "got --numeric --lr=2"


def test_help_says_how_to_get_the_help_of_the_script(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["piper"])
    for name in COMMANDS:
        shown = call(name, str(script), "--help").output
        assert f"The options of {script} itself: " in shown
        assert f" {name} {script} -- --help" in shown
        assert "The options of" not in call(name, "--help").output
    assert passed_on("show", str(script), "--", "--help") == "got --help"


def test_the_line_of_usage_has_the_arguments_of_the_script() -> None:
    for name in COMMANDS:
        line = next(line for line in call(name, "--help").output.splitlines() if "Usage" in line)
        assert "{" not in line
        assert line.rstrip().endswith("T [ARGUMENTS OF THE SCRIPT]...")  # of SCRIPT or TARGET


@pytest.mark.parametrize("name", ["check", "show"])
def test_a_strategy_in_a_file_takes_no_arguments(name: str, tmp_path: Path) -> None:
    file = tmp_path / "strategy.json"
    file.write_text(one_f_one_b(pp=2, microbatches=2).to_json())

    found = call(name, str(file), "--pp", "4")

    assert str(found.exception) == (
        f"{file}: only a script takes arguments, and it is not one: --pp 4\n  fix: leave them out"
    )
