"""The commands, as a user calls them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from draws import every
from shared_capture import one_model
from synthetic import moe_chain
from typer.testing import CliRunner

import piper.cli
from piper.cli import COMMANDS, app, app_of
from piper.cli.show import show_sections
from piper.errors import InputError, StrategyError
from piper.job.compile.compiler import compile_strategy
from piper.strategies import BUILDERS, one_f_one_b
from piper.view.schedule_grid import WHOLE

SCRIPT = Path(__file__).parent.parent / "scripts" / "tiny.py"


@pytest.fixture(autouse=True, scope="module")
def one_capture() -> Iterator[None]:
    """Nearly all tests are about one small model."""
    with one_model()():
        yield


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_schedule_prints_a_grid() -> None:
    assert call("schedule", "1f1b", "--pp", "2", "--microbatches", "3") == (
        "device 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --\n"
        "device 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .\n"
        "12 time steps, idle 25 %: F takes 1, B takes 2, communication takes none\n"
        "F0 forward, microbatch 0; B backward; -- still running; . idle\n"
    )


def test_a_schedule_in_a_file_is_shown_as_it_was_printed(tmp_path: Path) -> None:
    shape = ("schedule", "zbv", "--pp", "2", "--microbatches", "4")
    for form in ("csv", "json"):
        file = tmp_path / f"schedule.{form}"
        file.write_text(call(*shape, "--format", form))
        assert call("show", str(file)).startswith(call(*shape))


def test_what_a_command_shows_goes_to_a_file(tmp_path: Path) -> None:
    shape = ("schedule", "zbv", "--pp", "2", "--microbatches", "4")
    file = tmp_path / "schedule.txt"
    for option in ("-o", "--output", "--out"):
        assert call(*shape, option, str(file)) == f"{file}\n"
        assert file.read_text() == call(*shape)
    for words in (("show", str(SCRIPT)), ("simulate", str(SCRIPT))):
        assert call(*words, "-o", str(file)) == f"{file}\n"
        assert file.read_text() == call(*words)
    for page in (tmp_path / "page.html", tmp_path / "page"):
        assert call("view", str(SCRIPT), "-o", str(page)).startswith(str(page))
        assert page.read_text().startswith("<!doctype html>")


def test_the_ending_of_a_file_says_what_is_written(tmp_path: Path) -> None:
    shape = ("schedule", "zbv", "--pp", "2", "--microbatches", "4")
    for form in ("csv", "json", "svg"):
        file = tmp_path / f"schedule.{form}"
        call(*shape, "-o", str(file))
        assert file.read_text() == call(*shape, "--format", form)
    page, numbers, picture, plot = (
        tmp_path / f"a{one}" for one in (".html", ".json", ".svg", "b.svg")
    )
    call("simulate", str(SCRIPT), "-o", str(page))
    call("simulate", str(SCRIPT), "-o", str(numbers))
    call("simulate", str(SCRIPT), "--set", "pp=1,2", "-o", str(plot))
    call("show", str(SCRIPT), "-o", str(picture))

    assert page.read_text().startswith("<!doctype html>")
    assert "seconds" in json.loads(numbers.read_text())
    assert picture.read_text().startswith("<svg") and plot.read_text().startswith("<svg")
    with pytest.raises(StrategyError, match="would be a plot of a sweep"):
        call("simulate", str(SCRIPT), "-o", str(plot))


def test_show_draws_some_steps_of_some_devices() -> None:
    drawn = call("show", str(SCRIPT), "--steps", "1:4", "--devices", "1").splitlines()

    assert drawn[:2] == ["time steps 1 to 4", "device 1  F0 B0 -- F1"]
    assert [line[:8] for line in drawn if "peak" in line] == ["device 1"]


def test_a_page_of_two_equal_strategies_says_so(tmp_path: Path) -> None:
    page, two = ("-o", str(tmp_path / "a.html")), (str(SCRIPT), "--pp", "2", str(SCRIPT), "--pp")

    assert "both are the same: does tiny.py read" in call("view", *two, "2", *page)
    assert "both are the same" not in call("view", *two, "4", *page)
    assert "both are the same" not in call("view", *two, "2", "--schedule", "gpipe", *page)


def test_show_refuses_devices_that_the_strategy_does_not_use() -> None:
    with pytest.raises(InputError, match="--devices: the strategy has no device 7"):
        call("show", str(SCRIPT), "--devices", "1,7")


def test_schedule_prints_csv_as_pytorch_reads_it() -> None:
    found = call("schedule", "zb-h1", "--pp", "2", "--microbatches", "2", "--format", "csv")

    assert found.splitlines() == ["0F0,0F1,0I0,0W0,0I1,0W1", "1F0,1I0,1F1,1I1,1W0,1W1"]


def test_schedule_prints_json_that_loads(tmp_path: Path) -> None:
    found = call("schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--format", "json")
    file = tmp_path / "strategy.json"
    file.write_text(found)

    assert call("check", str(file)).startswith("ok: 6 directives")
    assert one_f_one_b(pp=2, microbatches=2).to_json() == found


@pytest.mark.parametrize("name", every(2, BUILDERS))
def test_every_builder_prints_in_every_form(name: str) -> None:
    for form in ("grid", "csv", "json", "svg"):
        assert call("schedule", name, "--pp", "4", "--microbatches", "8", "--format", form)


def test_an_unknown_schedule_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(StrategyError) as refused:
        call("schedule", "2f2b", "--pp", "2", "--microbatches", "2")

    assert str(refused.value) == (
        "schedule: there is no schedule '2f2b'\n"
        "  fix: choose one of gpipe, 1f1b, interleaved-1f1b, zb-h1, interleaved-zb, zbv, "
        "dualpipev, dualpipe"
    )


@pytest.mark.parametrize("file", ["train.py", "plans/zbv.json", "gpipe.csv"])
@pytest.mark.parametrize("options", [(), ("--pp", "2", "--microbatches", "2")])
def test_schedule_of_a_file_names_the_command_that_draws_it(
    file: str, options: tuple[str, ...]
) -> None:
    with pytest.raises(StrategyError) as refused:
        call("schedule", file, *options)

    assert str(refused.value) == (
        f"schedule: {file} is a file, and not a built-in schedule\n  fix: write: piper show {file}"
    )


@pytest.mark.parametrize("name", ["schedule.txt", "schedule"])
@pytest.mark.parametrize("command", ["check", "simulate", "show"])
def test_files_are_known_by_their_ending(command: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("0F0,0B0\n")

    found = CliRunner().invoke(app, [command, str(tmp_path / name)])

    assert "does not say what it is\n  fix: name a training script .py" in str(found.exception)


@pytest.mark.parametrize("name", ["plan.json", "plan.csv"])
@pytest.mark.parametrize("command", ["run", "simulate"])
def test_a_strategy_in_place_of_a_script_is_refused(
    command: str, name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text("[]")

    with pytest.raises(StrategyError, match="this command needs a model, not only a strategy"):
        call(command, str(file))


def test_check_compiles_a_script_without_starting_anything() -> None:
    found = call("check", str(SCRIPT))

    assert re.match(r"ok: 2 devices, \d+ nodes, \d+ instructions", found)


def test_show_draws_the_schedule_of_a_script() -> None:
    drawn = call("show", str(SCRIPT)).splitlines()

    assert drawn[:3] == [
        "device 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --",
        "device 1  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .",
        "drawn in 15 time steps: F takes 1, B takes 2, communication takes none",
    ]
    assert drawn[4].startswith("on the Trainer's costs (")
    assert "), with communication: idle " in drawn[4]
    assert drawn[5:8] == [
        "stage  layers     parameters  FLOPs  time  activations",
        "PP=0   as tagged         200   50 %  50 %        192 B",
        "PP=1   as tagged          72   50 %  50 %        192 B",
    ]
    assert drawn[8] == (
        "time: by estimates for one CPU core per device; "
        "activations: what one microbatch keeps for its backward"
    )
    assert drawn[9].startswith("device 0  peak 4.6 KiB (parameters 800 B, optimizer 1.6 KiB, ")
    assert drawn[9].endswith("; sends 384 B on pp")


def test_show_says_what_streams_get_of_a_gpu(tmp_path: Path) -> None:
    more = 'microbatches=4) + piper.Stream("pp", 4, "high")'
    script = tmp_path / "shares.py"
    script.write_text(SCRIPT.read_text().replace("microbatches=4)", more))

    drawn = call("show", str(script)).splitlines()

    assert drawn[-1] == "streams: pp (4 SMs, high)"


def test_show_and_check_know_orders_of_messages(tmp_path: Path) -> None:
    order = (
        """piper.Order([piper.where(PP=0, MB=3, PASS="F"), piper.where(PP=0, MB=2, PASS="SEND")])"""
    )
    script = tmp_path / "ordered.py"
    script.write_text(SCRIPT.read_text().replace("microbatches=4)", f"microbatches=4) + {order}"))

    drawn = call("show", str(script)).splitlines()

    assert drawn[-1] == "PP0:F@3 -> send PP0/0@2>1  # order (directive 7 of 7)"
    assert call("check", str(script)).endswith("1 of them with messages or updates\n")
    assert "order: PP0:F@3;  then ; where(PP=0" in call("show", str(script), "--after", "7")


def test_show_and_simulate_know_what_is_recomputed(tmp_path: Path) -> None:
    more = "microbatches=4) + piper.Remat(piper.where())"
    script = tmp_path / "recomputed.py"
    script.write_text(SCRIPT.read_text().replace("microbatches=4)", more))

    kept, found = (call("simulate", str(one)) for one in (SCRIPT, script))
    speeds = [
        int(re.search(r"([\d,]+) tokens/s", one)[1].replace(",", "")) for one in (kept, found)
    ]

    assert speeds[0] > speeds[1]
    assert "peak memory 4.6 KiB on device 0" in kept
    assert "peak memory 4.4 KiB on device 0" in found
    shown = call("show", str(script))
    assert "device 0  peak 4.4 KiB " in shown
    line = "PP0, PP1 recompute, and keep inputs: "
    assert line in shown and line in found and line not in kept


def test_show_says_what_the_times_of_overlapping_work_stand_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    strategy = BUILDERS["dualpipev"](pp=2, dp=2, ep=2, microbatches=4)
    compiled = compile_strategy(moe_chain(4), strategy.directives)

    show_sections(compiled, WHOLE)

    drawn = capsys.readouterr().out.splitlines()
    assert any("% hidden behind compute" in line for line in drawn)
    assert drawn[-1] == "nothing was measured: regions are estimated from FLOPs and bytes"


@pytest.mark.soak
def test_show_draws_the_example_with_experts() -> None:
    experts = Path(__file__).parents[2] / "examples" / "train_experts.py"

    drawn = call("show", str(experts)).splitlines()

    assert any("% hidden behind compute" in line for line in drawn)
    assert drawn[-1] == "nothing was measured: regions are estimated from FLOPs and bytes"


def test_show_says_if_another_mesh_sends_less_between_nodes() -> None:
    """Gradients: 2 * (800 + 288) bytes; activations and their gradients: 4 * 384."""
    four = ("show", str(SCRIPT), "--dp", "2", "--per-node", "2")

    assert call(*four).splitlines()[-1] == (
        "dp sends most (2.1 KiB in a step) and crosses nodes: "
        'mesh="pp,dp" sends 1.5 KiB between nodes in all instead of 2.1 KiB'
    )
    assert "mesh" not in call(*four, "--mesh", "pp,dp")
    assert "mesh" not in call("show", str(SCRIPT), "--dp", "2")


def test_schedule_takes_a_mesh() -> None:
    found = call(
        "schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--dp", "2", "--mesh", "pp,dp",
        "--format", "json",
    )  # fmt: skip

    assert one_f_one_b(pp=2, microbatches=2, dp=2, mesh="pp,dp").to_json() == found


def test_show_prints_the_plan_of_a_device_and_the_dag() -> None:
    assert call("show", str(SCRIPT), "--plan", "1").startswith("device 1\n   0  recv ")
    assert "transfer send PP0/0@0>1 on [0] => [1] [pp]" in call("show", str(SCRIPT), "--dag")
    assert "nowhere yet" in call("show", str(SCRIPT), "--after", "1")


def test_every_command_has_a_help_that_says_what_it_does() -> None:
    assert "Exit codes: 0" in call("--help")
    for command in ("run", "show", "check", "schedule", "simulate", "view"):
        assert f"Example: piper {command}" in call(command, "--help")


def test_output_in_a_pipe_has_no_colours_and_is_not_cut() -> None:
    drawn = call("schedule", "1f1b", "--pp", "32", "--microbatches", "64")

    assert "\x1b" not in drawn and "..." not in drawn
    assert sum(line.startswith("device") for line in drawn.splitlines()) == 32


def test_show_cuts_for_the_device_that_it_is_given() -> None:
    shown = call("show", str(SCRIPT), "--device", "h200")

    assert "time: by the data sheet of h200" in shown
    assert "on the data sheet of h200, with communication: idle " in shown


def test_one_command_is_loaded_alone_and_all_together() -> None:
    folder = Path(piper.cli.__file__).parent
    files = {one.stem for one in folder.glob("*.py") if "def add_to(" in one.read_text()}

    assert list(typer.main.get_command(app_of(["run"])).commands) == ["run"]
    assert typer.main.get_command(app).commands.keys() == files == set(COMMANDS)
