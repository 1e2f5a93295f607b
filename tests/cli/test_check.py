"""piper check, as a user and a CI job call it."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from shared_capture import one_model
from typer.testing import CliRunner

from piper.cli import app, main
from piper.plan.instructions import Add
from piper.runtime.execute import Program

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "tiny.py")


KNOWN = one_model()  # of the model of this script


def call(*arguments: str) -> Result:
    with KNOWN() if SCRIPT in arguments else nullcontext():
        return CliRunner().invoke(app, ["check", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(call("--json", *arguments).output)
    return result


def skip_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all but the first microbatch are dropped where the bucket is PP1."""
    right = Program.add

    def wrong(self: Program, add: Add) -> Any:
        return (lambda: None) if "PP1" in add.into else right(self, add)

    monkeypatch.setattr(Program, "add", wrong)


def test_what_was_proven_is_said_in_numbers() -> None:
    result = call(SCRIPT)

    assert result.exit_code == 0
    assert result.output == (
        "ok: 2 devices, 27 nodes, 69 instructions, executed together symbolically\n"
        "  no deadlock: 8 sends matched in order\n"
        "  nothing lost or duplicated: 16 passes, and 8 gradients counted once each in 2 updates\n"
        "  no leaks: 42 buffers freed once each\n"
        "  the order of the schedule kept: 14 pairs of neighbouring slots\n"
    )


def test_a_machine_gets_the_same_numbers() -> None:
    proof = found(SCRIPT, "--pp", "4")["proof"]

    assert (proof["devices"], proof["messages"], proof["passes"]) == (4, 24, 32)


def test_memory_of_a_device_that_is_not_here() -> None:
    result = call(SCRIPT, "--memory", "80")

    assert result.exit_code == 0
    assert result.output.splitlines()[0] == "fits: device 0 needs 4.6 KiB of 80.0 GiB"
    room = found(SCRIPT, "--memory", "80")["memory"]
    assert (room["device"], room["limit"]) == (0, 80 * 2**30) and 4600 < room["bytes"] < 4800


def test_what_does_not_fit_fails_with_a_table() -> None:
    result = call(SCRIPT, "--memory", "0.000002", "--json")

    answer = json.loads(result.output)
    what = answer["problems"][0]["what"].splitlines()
    assert result.exit_code == 1
    assert (answer["ok"], answer["where"]) == (False, "memory")
    assert what[0] == "device 0 needs 4.6 KiB, and has 2.1 KiB"
    assert what[1].split() == ["strategy", "peak", "memory", "fits", "step"]
    assert len(what) > 5


def test_numerics_compares_with_plain_pytorch() -> None:
    result = call(SCRIPT, "--numerics", "--steps", "2")

    rows = result.output.splitlines()
    assert result.exit_code == 0, result.output
    assert rows[6:8] == [
        "2 steps in float64, 4 microbatches: the strategy, and plain PyTorch in one process",
        "on random data like the example",
    ]
    assert [row.split()[-1] for row in rows[9:11]] == ["agree", "agree"]
    assert rows[-1] == (
        "ok: losses, gradient norms and 5 parameters agree to 1.5e-08 (half of the digits of "
        "float64)"
    )


def test_numerics_names_what_differs_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_adds(monkeypatch)

    result = call(SCRIPT, "--numerics", "--steps", "1")

    rows = result.output.splitlines()
    verdicts = {
        row.split()[0]: row.split()[-1] for row in rows if ".weight" in row or "bias" in row
    }
    assert result.exit_code == 1
    assert list(verdicts)[:2] == ["layers.1.bias", "layers.1.weight"]
    assert verdicts["layers.1.bias"] == verdicts["layers.1.weight"] == "WRONG"
    assert verdicts["layers.0.weight"] == verdicts["embedding.weight"] == "agree"
    assert rows[-2].startswith("WRONG: 2 of 5 parameters and 1 of 1 step differ by more than")


def test_numerics_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_adds(monkeypatch)

    result = found(SCRIPT, "--numerics", "--steps", "1", "--seed", "4")

    assert result["ok"] is False and result["proof"]["devices"] == 2
    assert result["numerics"]["parameters"][0]["name"].startswith("layers.1.")
    assert result["numerics"]["parameters"][0]["gradient"] > 0.1


def test_what_follows_two_dashes_is_the_scripts_own() -> None:
    assert found(SCRIPT, "--", "--pp", "4")["proof"]["devices"] == 4


@pytest.mark.parametrize("option", [("--steps", "2"), ("--seed", "1"), ("--all",)])
def test_an_option_of_numerics_without_it_is_wrong_usage(option: tuple[str, ...]) -> None:
    result = call(SCRIPT, *option)

    assert result.exit_code == 2
    assert "write it after `--`" in " ".join(result.output.replace("│", " ").split())


BAD = """
import torch, piper
from piper import Place, where
model, x = torch.nn.Linear(2, 2), torch.zeros(2, 2)
piper.Trainer(model, torch.nn.functional.mse_loss, [Place(where(PP=3), [0])], example=(x, x))
"""


def test_a_wrong_strategy_is_refused_in_json_and_by_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "bad.py"
    script.write_text(BAD)
    monkeypatch.setattr(sys, "argv", ["piper", "check", str(script), "--json"])

    with pytest.raises(SystemExit) as ended:
        main()

    printed = capsys.readouterr()
    refused = json.loads(printed.out)
    assert ended.value.code == 1
    assert refused["ok"] is False and refused["where"] == "place (directive 1 of 1)"
    assert refused["problems"][0]["fix"]
    assert printed.err.startswith("piper: place (directive 1 of 1): ")
