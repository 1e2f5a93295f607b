"""`piper view`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from views import measured, pipeline

from piper.cli import app
from piper.cli.view import targets
from piper.errors import StrategyError
from piper.view.run_file import load_run, save_view

SCRIPT = Path(__file__).parent.parent / "scripts" / "tiny.py"


def call(*arguments: object) -> list[str]:
    result = CliRunner().invoke(app, ["view", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def names(path: Path) -> list[str]:
    data = path.read_text().partition('id="data">')[2].partition("</script>")[0]
    return [run["name"] for run in json.loads(data)]


def test_a_script_becomes_a_page_a_picture_and_a_trace(tmp_path: Path) -> None:
    page, svg, trace = (tmp_path / name for name in ("a.html", "a.svg", "a.json"))

    said = call(SCRIPT, "-o", page, "--svg", svg, "--chrome", trace)

    assert said == [str(page), str(svg), str(trace)]
    assert names(page) == ["tiny"]
    assert svg.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_page_says_that_its_costs_are_estimated(tmp_path: Path) -> None:
    call(SCRIPT, "-o", tmp_path / "a.html", "--chrome", tmp_path / "a.json")

    notes = ("nothing was measured: regions are estimated from FLOPs and bytes",)
    assert load_run(tmp_path / "a.json").notes == notes
    assert notes[0] in (tmp_path / "a.html").read_text()


def test_a_recorded_run_becomes_a_page_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_view(tmp_path / "run.json", measured(pipeline()))

    assert call("run.json") == ["run.html"]
    assert names(tmp_path / "run.html") == ["1f1b"]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    for name in ("1f1b", "zb-h1"):
        save_view(tmp_path / f"{name}.json", measured(pipeline(name)))

    call(tmp_path / "1f1b.json", tmp_path / "zb-h1.json", "-o", tmp_path / "both.html")

    assert names(tmp_path / "both.html") == ["1f1b", "zb-h1"]


def test_what_follows_a_script_goes_to_it(tmp_path: Path) -> None:
    first, second, config = (tmp_path / name for name in ("a.py", "b.py", "c.json"))
    for path in (first, second, config):
        path.touch()

    found = targets(first, ["--config", str(config), "--fast", "--pp=2", str(second), "-x", "1"])

    assert found == [(first, ["--config", str(config), "--fast", "--pp=2"]), (second, ["-x", "1"])]


def test_a_second_file_that_is_not_there_is_not_passed_over(tmp_path: Path) -> None:
    save_view(tmp_path / "run.json", pipeline())

    with pytest.raises(StrategyError) as refused:
        call(tmp_path / "run.json", "runn.json")

    assert "`runn.json` is not a file to compare it with" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [("a.txt", "`.txt` cannot be shown"), ("a.json", "it cannot be read as JSON")],
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / name
    path.write_text("hello")

    with pytest.raises(StrategyError) as refused:
        call(path)

    assert what in str(refused.value)
