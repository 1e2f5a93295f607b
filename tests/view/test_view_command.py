"""`piper view`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from views import measured, pipeline

from piper.cli import app
from piper.cli.simulate import OWN_COSTS
from piper.cli.view import targets
from piper.errors import StrategyError
from piper.ir.by_device.schedule_rows import length
from piper.job.compile.stage_model import WITHOUT_MODEL
from piper.strategies import BUILDERS, to_csv
from piper.strategies.timing import strategy_rows
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

    assert said == [f"{page}: open it in a browser", str(svg), str(trace)]
    assert names(page) == ["tiny"]
    assert svg.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_page_of_one_script_with_other_arguments_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    said = call(SCRIPT, SCRIPT, "--schedule", "zb_h1")

    assert said == ["tiny-tiny-schedule-zb_h1.html: open it in a browser"]


def test_a_page_says_that_its_costs_are_estimated(tmp_path: Path) -> None:
    call(SCRIPT, "-o", tmp_path / "a.html", "--chrome", tmp_path / "a.json")

    notes = ("nothing was measured: regions are estimated from FLOPs and bytes",)
    assert load_run(tmp_path / "a.json").notes == notes
    assert notes[0] in (tmp_path / "a.html").read_text()


def test_a_schedule_or_a_strategy_in_a_file_becomes_a_page(tmp_path: Path) -> None:
    strategy = BUILDERS["zbv"](pp=2, microbatches=4)
    (tmp_path / "a.csv").write_text(to_csv(strategy))
    (tmp_path / "b.json").write_text(strategy.to_json())

    call(tmp_path / "a.csv", tmp_path / "b.json", "-o", tmp_path / "a.html")
    call(tmp_path / "a.csv", "--chrome", tmp_path / "trace.json")

    assert names(tmp_path / "a.html") == ["a", "b"]
    shown = load_run(tmp_path / "trace.json")
    assert shown.notes == (WITHOUT_MODEL,)
    assert shown.traces[0].seconds == pytest.approx(length(strategy_rows(strategy)), abs=0.1)


@pytest.mark.parametrize(
    ("schedule", "options", "peaks"),
    [
        ("1f1b", {"pp": 4}, [4, 3, 2, 1]),
        ("1f1b", {"pp": 2, "dp": 2}, [2, 1, 2, 1]),
        ("gpipe", {"pp": 4}, [8, 8, 8, 8]),
        ("zb-h1", {"pp": 4}, [4, 4, 4, 4]),
        ("zbv", {"pp": 4}, [4, 4, 4, 4]),  # half a MiB for each stage: no more than 1F1B
        ("interleaved-1f1b", {"pp": 4}, [5.5, 4.5, 3.5, 2.5]),
        ("dualpipe", {"pp": 4}, [4, 5, 5, 4]),  # whole stages of two replicas
    ],
)
def test_without_a_model_memory_counts_the_microbatches_that_devices_hold(
    tmp_path: Path, schedule: str, options: dict[str, int], peaks: list[float]
) -> None:
    strategy = BUILDERS[schedule](**options, microbatches=8)
    (tmp_path / "a.json").write_text(strategy.to_json())

    call(tmp_path / "a.json", "--chrome", tmp_path / "trace.json")

    shown = sorted(load_run(tmp_path / "trace.json").devices, key=lambda one: one.device)
    found = [one.peak["total"] / 2**20 for one in shown]
    assert found == pytest.approx(peaks, abs=0.01)


def test_a_strategy_that_needs_its_model_says_so(tmp_path: Path) -> None:
    strategy = BUILDERS["1f1b"](pp=2, dp=2, ep=2, microbatches=4)
    (tmp_path / "a.json").write_text(strategy.to_json())

    with pytest.raises(StrategyError, match="without its model it cannot be shown") as refused:
        call(tmp_path / "a.json")

    assert "piper view train.py" in str(refused.value)


def test_a_page_is_simulated_on_the_machine_that_it_names(tmp_path: Path) -> None:
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"

    call(SCRIPT, "--chrome", slow)
    call(SCRIPT, "--device", "h200", "--per-node", "2", "--chrome", fast)

    assert load_run(fast).machine == "the data sheet of h200, 2 devices in a node"
    assert load_run(slow).machine == f"{OWN_COSTS} (estimates for one CPU core per device)"
    assert load_run(fast).traces[0].seconds != load_run(slow).traces[0].seconds


def test_a_recorded_run_becomes_a_page_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_view(tmp_path / "run.json", measured(pipeline()))

    assert call("run.json") == ["run.html: open it in a browser"]
    assert names(tmp_path / "run.html") == ["1f1b"]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    for name in ("1f1b", "zb-h1"):
        save_view(tmp_path / f"{name}.json", measured(pipeline(name)))

    call(tmp_path / "1f1b.json", tmp_path / "zb-h1.json", "-o", tmp_path / "both.html")

    assert names(tmp_path / "both.html") == ["1f1b", "zb-h1"]


def test_two_runs_of_one_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_view(tmp_path / f"{name}.json", measured(pipeline("1f1b")))

    call(tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / "both.html")

    assert names(tmp_path / "both.html") == ["1f1b (a.json)", "1f1b (b.json)"]


def test_what_follows_a_script_goes_to_it(tmp_path: Path) -> None:
    first, second, config = (tmp_path / name for name in ("a.py", "b.py", "c.json"))
    for path in (first, second, config):
        path.touch()

    found = targets(first, ["--config", str(config), "--fast", "--pp=2", str(second), "-x", "1"])

    assert found == [(first, ["--config", str(config), "--fast", "--pp=2"]), (second, ["-x", "1"])]


def test_a_second_file_that_is_not_there_is_not_passed_over(tmp_path: Path) -> None:
    save_view(tmp_path / "run.json", pipeline())

    near = tmp_path / "runn.json"
    found = CliRunner().invoke(app, ["view", str(tmp_path / "run.json"), str(near)])

    said = "".join(found.output.replace("│", " ").split())
    assert found.exit_code == 2
    assert f"file'{near}'doesnotexist.Didyoumean{tmp_path}/run.json?" in said


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
