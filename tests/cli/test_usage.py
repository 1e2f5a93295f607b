"""What is typed wrong ends a command with exit code 2, and with what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from draws import one_of
from typer.testing import CliRunner

from piper.cli import app, main
from piper.cli.usage import named_device
from piper.errors import PiperError

TINY = Path(__file__).parent.parent / "scripts" / "tiny.py"
WRONG = {
    "a schedule": (["schedule", "1f1"], "did you mean 1f1b or interleaved-1f1b?"),
    "a schedule of torch": (["schedule", "ScheduleZBVZeroBubble"], "did you mean zbv?"),
    "a device": (["simulate", str(TINY), "--device", "h10"], "did you mean h100"),
    "a network": (["simulate", str(TINY), "--network", "h20"], "did you mean h200"),
    "costs": (["simulate", str(TINY), "--costs", "cost.json"], "there is no file 'cost.json'"),
    "a setting": (["simulate", str(TINY), "--set", "pp"], "--set"),
    "steps": (["show", str(TINY), "--steps", "1:x"], "steps"),
    "a plan": (["show", str(TINY), "--plan", "99"], "device 99"),
    "a cluster": (["run", str(TINY), "--on", "slurm"], "slurm"),
    "a GPU of another family": (
        ["simulate", str(TINY), "--device", "b200"],
        "measure on it with --profile costs.json, and give --costs costs.json",
    ),
    "processes in words": (["run", str(TINY), "-n", "two"], "'two' is not a number of processes"),
    "no processes": (["run", str(TINY), "-n", "0"], "processes: write -n 2, for example"),
    "processes of mpirun": (["run", str(TINY), "-np", "2"], "-np is an option of mpirun"),
    "processes as others count them": (["run", str(TINY), "--np", "2"], "Did you mean -n?"),
    "and with a sign": (["run", str(TINY), "--nproc-per-node=2"], "Did you mean -n?"),
    "a picture": (["view", str(TINY), "--svg", "a.pdf"], "write a.svg"),
    "another picture": (["view", str(TINY), "--png", "a.jpg"], "write a.png"),
    "a picture of a schedule": (["show", str(TINY), "--svg", "a.png"], "write --svg a.svg"),
    "a text in a picture": (["show", str(TINY), "-o", "a.png"], "write -o a.svg for the picture"),
    "a picture of a plan": (
        ["show", str(TINY), "--plan", "0", "-o", "a.svg"],
        "leave out the .svg",
    ),
    "a picture of a DAG": (["show", str(TINY), "--dag", "--svg", "a.svg"], "is no picture"),
    "steps beyond the end": (["show", str(TINY), "--steps", "900:10"], "has time steps 0 to"),
    "no steps": (["show", str(TINY), "--steps", "2:0"], "has time steps 0 to"),
    "a checkpoint alone": (["checkpoint", "runs/q"], "Write: piper checkpoint show runs/q"),
    "checkpoints to list": (["checkpoint", "list", "runs"], "Write: piper checkpoint show runs"),
    "no checkpoint": (["checkpoint", "list"], "Write: piper checkpoint show FOLDER"),
    "processes before the script": (
        ["run", "--nproc-per-node", "2", str(TINY)],
        "no such option: --nproc-per-node. Did you mean -n?",
    ),
    "several hosts": (["run", "--nnodes=2", str(TINY)], "On several hosts, start the script with"),
    "a launcher": (["launch", "train.py"], "To run a script, write: piper run train.py"),
    "a training": (["train", "--lr", "train.py"], "To run a script, write: piper run train.py"),
    "gigabytes": (["check", str(TINY), "--memory", "80GB"], "is not a number of GiB: write 80"),
    "no number": (["check", str(TINY), "--memory", "all"], "number of GiB: write 80, for example"),
    "no memory": (["check", str(TINY), "--memory=-1"], "is no amount of memory: write 80"),
}


@one_of(3)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_typed_wrong_is_wrong_usage(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = WRONG[name]
    monkeypatch.setattr("sys.argv", ["piper", *words])

    with pytest.raises(SystemExit) as left:
        main()

    printed = "".join(capsys.readouterr())
    words = " ".join(printed.replace("│", " ").split())
    assert (left.value.code, said in words) == (2, True), printed


def test_another_gpu_is_not_taken_for_a_misspelt_one() -> None:
    with pytest.raises(PiperError) as refused:
        named_device("b200")

    assert "did you mean" not in str(refused.value)


def test_a_mistake_in_a_script_is_none_of_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import piper\npiper.strategies.one_f_one_b(pp=0, microbatches=2)\n")
    monkeypatch.setattr("sys.argv", ["piper", "show", str(script)])

    with pytest.raises(SystemExit) as left:
        main()

    assert left.value.code == 1


def test_a_misspelt_script_gets_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "notes.txt").write_text("")

    for command in ("show", "run", "check", "simulate", "view"):
        found = CliRunner().invoke(app, [command, str(tmp_path / "trian.py")])

        said = "".join(found.output.replace("│", " ").split())
        assert found.exit_code == 2
        assert f"Didyoumean{tmp_path}/train.py?" in said


def test_a_missing_script_with_no_neighbour_is_only_missing(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["show", str(tmp_path / "nowhere" / "train.py")])

    assert found.exit_code == 2
    assert "doesnotexist." in "".join(found.output.split()) and "mean" not in found.output


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("[0], [2]", "it uses devices [0, 2]: device 1 is not used"),
        ("[1], [3]", "it uses devices [1, 3]: devices 0 and 2 are not used"),
    ],
)
def test_devices_that_are_left_out_are_refused_as_a_run_would(
    devices: str, words: str, tmp_path: Path
) -> None:
    first, second = devices.split(", ")
    script = tmp_path / "train.py"
    script.write_text(
        "import piper, torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "x = torch.ones(4, 4)\n"
        "piper.Trainer(net, torch.nn.functional.mse_loss, [\n"
        f"    piper.Stage('PP', 2), piper.Place(piper.where(PP=0), {first}),\n"
        f"    piper.Place(piper.where(PP=1), {second}), piper.Split('MB', 2)], example=(x, x))\n"
    )

    found = CliRunner().invoke(app, ["check", str(script)])

    assert isinstance(found.exception, PiperError)
    assert words in str(found.exception)
