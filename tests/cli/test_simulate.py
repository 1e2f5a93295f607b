"""piper simulate, as a user calls it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from draws import one_of
from shared_capture import one_model
from typer.testing import CliRunner

from piper.cli import app
from piper.cli.simulate import SimulatedMachine, simulated
from piper.cli.sweep import settings_of, sweep
from piper.cli.target import inspect
from piper.costs import Costs
from piper.costs.links import NETWORKS, Network
from piper.costs.measured import Figure, RegionKey
from piper.errors import StrategyError
from piper.names import Phase
from piper.plan.analyse.memory import Peak
from piper.sim.prediction import Prediction
from piper.sim.report import Report
from piper.view.reports.sweep import SweepResult, ranked, table

OTHER = RegionKey("other", Phase.FORWARD)
SCRIPT = str(Path(__file__).parent.parent / "scripts" / "tiny.py")


KNOWN = one_model()  # of the model of the script, whatever is simulated of it


def call(*arguments: str) -> str:
    with KNOWN():
        result = CliRunner().invoke(app, ["simulate", SCRIPT, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_step_is_told_on_one_screen() -> None:
    lines = call("--device", "h200").splitlines()

    assert re.fullmatch(
        r"step [\d.]+ (us|ms) on 2 devices, [\d,]+ tokens/s; idle \d+ % "
        r"\(\d+ % bubble, \d+ % exposed communication\)",
        lines[0],
    )
    assert re.fullmatch(r"per device [\d,]+ tokens/s, MFU (<0.1|[\d.]+) %", lines[1])
    for stream, line in zip(("loss_norm", "pp"), lines[2:], strict=False):
        waits = rf"  {stream} +exposed \d+ us per device, \d+ % of its communication"
        assert re.match(waits, line)
    assert lines[2].endswith("its communication (all-reduce of loss and norm)")
    assert sum(line.startswith("the host takes longer to launch") for line in lines) == 1
    assert lines.count("longest instructions, once each:") == 1
    assert any("parameters" in line and "optimizer" in line for line in lines)
    assert sum(line.startswith("advice: ") for line in lines) == 1
    assert "peak memory 4.6 KiB on device 0: fits in 131.3 GiB" in lines
    path = r"critical path: stage PP=0 on device 0 \(\d+ %\), "
    assert any(re.match(path, line) for line in lines)
    table = lines.index(next(line for line in lines if line.startswith("devices")))
    assert lines[table].split() == [
        "devices", "compute", "exposed", "loss_norm", "exposed", "pp", "bubble", "peak", "memory",
    ]  # fmt: skip
    rows = lines[table + 1 : table + 3]
    assert [line.split()[:2] for line in rows] == [["device", "0"], ["device", "1"]]
    assert any(line == "simulated on the data sheet of h200" for line in lines)


OPTIMIZERS = """import sys
from functools import partial

import piper, torch

make = {"plain": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam}[sys.argv[1]]
x, ema = torch.ones(4, 16), 0.9 if "ema" in sys.argv else None
loss = torch.nn.functional.mse_loss
piper.Trainer(torch.nn.Linear(16, 16), loss, example=(x, x), optimizer=make, ema=ema)
"""


@one_of(2)
@pytest.mark.parametrize(
    ("words", "state"),
    [(["plain"], 0), (["momentum"], 1), (["adam"], 2), (["adam", "ema"], 3), (["plain", "ema"], 1)],
)
def test_the_state_is_that_of_the_optimizer_of_the_script(
    words: list[str], state: int, tmp_path: Path
) -> None:
    script, page = tmp_path / "train.py", tmp_path / "a.html"
    script.write_text(OPTIMIZERS)
    held = f"optimizer {state * 1088 / 1024:.1f} KiB" if state else "parameters 1.1 KiB"

    shown = CliRunner().invoke(app, ["show", str(script), *words], catch_exceptions=False).output
    timed = (
        CliRunner()
        .invoke(app, ["simulate", str(script), *words, "--json", str(tmp_path / "a.json")])
        .output
    )
    CliRunner().invoke(app, ["view", str(script), *words, "-o", str(page)], catch_exceptions=False)

    assert held in " ".join(shown.split()) and held in " ".join(timed.split())
    (device,) = json.loads((tmp_path / "a.json").read_text())["devices"]
    assert device["held_bytes"].get("optimizer", 0) == state * 1088
    assert ("optimizer" in shown.split("peak")[1]) == (state > 0)
    assert re.search(rf'"optimizer": ?{state * 1088}\b', page.read_text())


def test_the_size_of_the_state_can_be_given(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OPTIMIZERS)

    found = CliRunner().invoke(app, ["simulate", str(script), "plain", "--optimizer", "2"])

    assert "optimizer 2.1 KiB" in found.output


def test_show_simulate_and_view_have_one_idle_figure(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["show", SCRIPT], catch_exceptions=False).output
    found = call("--json", str(tmp_path / "step.json"))
    step = json.loads((tmp_path / "step.json").read_text())
    busy = sum(one["compute"] for one in step["devices"])  # what a page divides by its width

    assert step["idle"] == pytest.approx(1 - busy / (2 * step["seconds"]))
    figure = re.search(r"idle [\d.]+ % \([^)]*\)", found)
    assert figure and f", with communication: {figure[0]}; " in " ".join(shown.split())
    assert len(re.findall(r"idle \d+ %|\d+ % idle|% empty", shown)) == 1


def test_messages_may_take_no_time() -> None:
    assert "0 % exposed communication" in call("--device", "h200", "--network", "none")


def test_without_a_device_the_costs_it_was_compiled_with_count() -> None:
    found = call()

    assert found.startswith("step ")
    assert "fits" not in found  # nobody said how much memory there is


def test_measured_costs_and_a_network_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(Costs(link=1e3, latency=1.0).to_json())
    (tmp_path / "network.json").write_text(NETWORKS["h100"].to_json())

    slow = seconds(tmp_path, "--costs", str(tmp_path / "costs.json"))
    quick = seconds(
        tmp_path, "--costs", str(tmp_path / "costs.json"), "--network",
        str(tmp_path / "network.json"),
    )  # fmt: skip

    assert slow > 5.0  # messages of a second each
    assert quick < 0.1


def seconds(folder: Path, *arguments: str) -> float:
    call(*arguments, "--json", str(folder / "out.json"))
    return float(json.loads((folder / "out.json").read_text())["seconds"])


def test_devices_of_other_nodes_are_further_away(tmp_path: Path) -> None:
    together = seconds(tmp_path, "--device", "h200")
    apart = seconds(tmp_path, "--device", "h200", "--per-node", "1")

    assert apart > together


def test_a_sweep_sets_the_arguments_of_the_script(tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "sweep.svg"
    found = call(
        "--device", "h200", "--set", "pp=2,4,0", "--json", str(file), "--plot", str(picture)
    ).splitlines()

    assert found[0].split() == ["pp", "step", "tokens/s", "bubble", "exposed", "peak", "memory"]
    assert sorted(line.split()[0] for line in found[1:3]) == ["2", "4"]
    assert found[3:] == [
        "pp=0: no result",
        "    1f1b: pp=0 is too small",
        "      fix: write pp=1 or more",
        "nothing was measured: regions are estimated from FLOPs and bytes",
        "the host takes longer to launch most operators (24 us each) than the device to compute "
        "them; larger microbatches help, and so do CUDA graphs, "
        "which a Trainer uses by default where they are faster",
    ]
    rows = json.loads(file.read_text())
    assert [row["settings"]["pp"] for row in rows][-1] == "0"
    assert [row["seconds"] for row in rows[:2]] == sorted(row["seconds"] for row in rows[:2])
    assert picture.read_text().count("<circle") == 2 + 2  # points, and the legend


@pytest.mark.soak
def test_a_sweep_in_several_processes_gives_the_same_rows() -> None:
    one = partial(simulated, Path(SCRIPT), SimulatedMachine(), [])
    settings = {"pp": ["2", "many", "4", "0"]}

    here, there = sweep(one, settings), sweep(one, settings, worth=0.0)

    assert [row.to_dict() for row in here] == [row.to_dict() for row in there]
    assert [bool(row.refused) for row in there] == [False, True, False, True]


LAYERS = """
import torch, piper
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        widths = [8, 12, 10, 14, 8]
        self.layers = torch.nn.ModuleList(map(torch.nn.Linear, widths, widths[1:]))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
x = torch.ones(4, 8)
strategy = piper.strategies.gpipe(pp=2, microbatches=2)
piper.Trainer(Net(), torch.nn.functional.mse_loss, strategy, example=(x, x))
"""


@pytest.mark.parametrize("slow", [0, 3])
def test_measured_costs_cut_the_stages(slow: int, tmp_path: Path) -> None:
    script, file = tmp_path / "net.py", tmp_path / "costs.json"
    script.write_text(LAYERS)
    codes = [region.code for region in inspect(script, []).compiled.dag.model.regions]
    keys = [RegionKey(code, phase) for code in codes for phase in (Phase.FORWARD, Phase.BACKWARD)]
    figures = {key: Figure(1.0 if key.code == codes[slow] else 0.01) for key in keys}
    file.write_text(Costs(figures=figures).to_json())

    command = ["simulate", str(script), "--costs", str(file), "--json", str(tmp_path / "out.json")]
    CliRunner().invoke(app, command, catch_exceptions=False)

    assert len(set(codes)) == 4
    devices = json.loads((tmp_path / "out.json").read_text())["devices"]
    quick = 1 if slow == 0 else 0  # the device of the other three layers
    assert devices[quick]["compute"] == pytest.approx(3 * 2 * 2 * 0.01, rel=0.05)


def row(name: str, seconds: float, peak: int, tokens: int = 100) -> SweepResult:
    found = Report(seconds, (), (), {})
    return SweepResult(
        {"k": name}, Prediction(found, {0: Peak(peak, 0, {})}, {0: (0,)}, 1, tokens, 1000.0)
    )


def test_the_best_comes_first_and_what_cannot_run_last() -> None:
    rows = [
        SweepResult({"k": "refused"}, refused="no"), row("too large", 0.1, 2000),
        row("slow", 3.0, 10), row("quick", 1.0, 500), row("twice the batch", 1.5, 600, tokens=200),
    ]  # fmt: skip

    def order(by: str) -> list[str]:
        return [one.settings["k"] for one in ranked(rows, by)]

    assert order("step") == ["twice the batch", "quick", "slow", "too large", "refused"]
    assert order("memory") == ["slow", "quick", "twice the batch", "too large", "refused"]


def test_a_note_on_some_rows_names_them() -> None:
    one, two, three = row("1", 1.0, 10), row("2", 2.0, 10), row("3", 3.0, 10)
    rows = [
        replace(one, found=replace(one.found, notes=("all", "some"))),
        replace(two, found=replace(two.found, notes=("all",))),
        replace(three, found=replace(three.found, notes=("all", "some"))),
    ]

    assert table(rows).splitlines()[4:] == ["all", "k=1; k=3: some"]


def test_a_script_that_refuses_an_argument_has_its_word_in_the_row() -> None:
    found = call("--set", "pp=2,many")

    assert (
        "pp=many: no result\n    tiny.py: error: argument --pp: invalid int value: 'many'" in found
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "there is no device 'abacus'"),
        (["--network", "pigeons"], "there is no network 'pigeons'"),
        (["--set", "pp"], "--set pp\n  fix: write --set microbatches=4,8,16"),
        (["--set", "pp=2", "--chrome", "x.json"], "--view and --chrome show one step"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(StrategyError) as refused:
        call(*arguments)

    assert message in str(refused.value)


def test_a_trace_and_a_page_are_written(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"

    call("--device", "h200", "--chrome", str(trace), "--view", str(page))

    assert json.loads(trace.read_text())["traceEvents"]
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def test_settings_are_read_in_their_order() -> None:
    assert list(settings_of(["--b=1,2", "a=x"])) == ["b", "a"]


def test_the_files_on_the_page_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    costs, network = re.findall(r"```json\n(.*?)```", page, re.DOTALL)

    assert Costs.from_json(costs).ahead and len(Costs.from_json(costs).figures) == 2
    assert Network.from_json(network).pairs[0, 8].bandwidth == 1e10


def test_costs_are_measured_here_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper.job.programs.profiling.machine", lambda: Costs(cores=2.0))
    file = tmp_path / "costs.json"
    file.write_text(Costs(figures={OTHER: Figure(1.0)}).to_json())

    told = call("--profile", str(file))

    found = Costs.from_json(file.read_text())
    assert f"wrote {file}: {len(found.figures) - 1} costs of regions and phases" in told
    assert found.figures[OTHER].seconds == 1.0 and found.cores == 2.0
    assert call("--costs", str(file)).splitlines()[-4:] == told.splitlines()[-4:]
    with pytest.raises(StrategyError, match="leave out --device and --costs"):
        call("--profile", str(file), "--device", "h200")


def test_a_job_may_have_several_kinds_of_devices(tmp_path: Path) -> None:
    for name, figure in (("fast", 1e-3), ("slow", 1.0)):
        costs = Costs(flops=1e3 / figure, memory=1e3 / figure, ahead=True)
        (tmp_path / f"{name}.json").write_text(costs.to_json())
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"

    one = seconds(tmp_path, "--costs", str(fast))
    both = seconds(tmp_path, "--costs", f"{fast}:0,{slow}:1")
    other = seconds(tmp_path, "--costs", str(slow))

    assert one < both < other
    table = call("--device", "h200:0,a100:1").splitlines()[-2:]
    assert [line.split()[:2] for line in table] == [["device", "0"], ["device", "1"]]
    lines = call("--costs", f"{fast}:0,{slow}:1").splitlines()
    shares = [line for line in lines if re.search(r"computes \d+ % of the step, \d+ %", line)]
    assert [line.split()[0] for line in shares] == [str(fast), str(slow)]
    assert any(line.startswith(f"{slow} bounds the step, and {fast} could do") for line in lines)
    assert not any("bounds the step, and" in line for line in call("--costs", str(slow)))


def test_a_device_that_is_not_listed_is_told() -> None:
    with pytest.raises(StrategyError, match="the job has device 1, which is not listed"):
        call("--device", "h200:0,a100:2")
