"""Metrics of steps go where the user wants them, and parameter groups follow names."""

from __future__ import annotations

import csv
import errno
import io
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import piper
from piper.errors import InputError
from piper.job.loop.metric_log import Printed, log_makers, metric_log
from piper.job.model_flops import model_flops
from piper.runtime.metrics import NAMES, Metrics, Readings
from piper.runtime.steps_in_flight import HostSteps

X = torch.ones(4, 3)


def metrics(step: int, **given: Any) -> Metrics:
    return Metrics(step, 2, 8, lambda: Readings(2.0, 1.0, 0.5, 0.25), **given)


def test_a_run_writes_a_row_for_each_step(tmp_path: Path) -> None:
    path, seen = tmp_path / "logs" / "a.csv", []
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    trainer = piper.Trainer(
        nn.Linear(3, 3), functional.mse_loss, example=(X, X), lr_scheduler=halving,
        optimizer=partial(torch.optim.SGD, lr=0.5), log=[path, lambda one: seen.append(one.step)],
    )  # fmt: skip

    given = [trainer.step(X, X) for _ in range(3)]

    assert seen == [1, 2, 3], "on the CPU, a step is over when it returns"
    trainer.close()
    rows = list(csv.DictReader(path.open()))
    assert seen == [1, 2, 3] and [float(row["loss"]) for row in rows] == [m.loss for m in given]
    assert [float(row["lr"]) for row in rows] == [0.5, 0.25, 0.125] == [m.lr for m in given]
    assert list(rows[0]) == list(NAMES) and rows[0]["mfu"] == ""


def test_a_run_that_resumes_adds_rows(tmp_path: Path) -> None:
    for step in (1, 2):
        log = metric_log(log_makers(str(tmp_path / "a.csv")), rank=0)
        log.add(metrics(step))
        log.close()

    text = (tmp_path / "a.csv").read_text().splitlines()

    assert len(text) == 3 and text[0].startswith("step,loss")


def test_steps_that_are_taken_again_have_one_row(tmp_path: Path) -> None:
    """A run that ended after step 3 resumes from its checkpoint of step 2."""
    file = tmp_path / "a.csv"
    first = metric_log(log_makers(file), rank=0)
    for step in (1, 2, 3):
        first.add(metrics(step))
    first.close()
    with file.open("a") as torn:
        torn.write("4,2.")  # the process was killed while it wrote

    again = metric_log(log_makers(file), rank=0)
    again.resume(2)
    for step in (3, 4):
        again.add(metrics(step))
    again.close()

    assert [row["step"] for row in csv.DictReader(file.open())] == ["1", "2", "3", "4"]


def test_a_run_that_begins_anew_keeps_the_file_of_the_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.csv"
    for steps in ((1, 2), (1, 2, 3), (1,)):
        log = metric_log(log_makers(file), rank=0)
        log.resume(0)
        with caplog.at_level("INFO", "piper"):
            for step in steps:
                log.add(metrics(step))
        log.close()

    def steps_in(name: str) -> list[str]:
        return [row["step"] for row in csv.DictReader((tmp_path / name).open())]

    assert steps_in("a.1.csv") == ["1", "2"] and steps_in("a.2.csv") == ["1", "2", "3"]
    assert steps_in("a.csv") == ["1"]
    first = f"log: the rows of an earlier run in {file} are now in a.1.csv"
    assert [one.message for one in caplog.records] == [first, first.replace("1.csv", "2.csv")]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    log = metric_log(log_makers(tmp_path / "a.csv"), rank=1)
    log.add(metrics(1))
    log.close()

    assert not list(tmp_path.iterdir())


def test_a_step_on_a_gpu_is_written_before_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if steps were in flight: nothing reads metrics before it must."""
    seen: list[Any] = []
    monkeypatch.setattr(HostSteps, "over", False)
    log = lambda one: seen.append(one.step)  # noqa: E731
    trainer = piper.Trainer(nn.Linear(3, 3), functional.mse_loss, example=(X, X), log=log)

    first = trainer.step(X, X)
    assert seen == []
    second = trainer.step(X, X)
    assert seen == [1]
    seen.append(f"{first.loss > 0}: {first.step}")
    assert seen == [1, "True: 1"], "the second step is not waited for"
    seen.append(f"{second.loss > 0}: {second.step}")
    assert seen == [1, "True: 1", 2, "True: 2"]
    trainer.step(X, X)
    seen.append(trainer.evaluate([(X, X)]).batches)
    trainer.step(X, X)
    trainer.close()

    assert seen == [1, "True: 1", 2, "True: 2", 3, 1, 4]


FIRST = "step: 1  loss: 2.00000  grad_norm: 1.0000  memory: 0.25 GiB  tokens/s: 16"
SECOND = FIRST.replace("1", "2", 1)


def test_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Printed()
    sink.write(metrics(1))
    sink.write(metrics(2))
    sink.close()

    assert capsys.readouterr().out == f"{FIRST}\n{SECOND}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_live_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "31")
    sink = Printed()

    for step in (1, 2):
        sink.write(metrics(step))
    print("saved")
    print("a warning", file=sys.stderr)
    sink.write(metrics(1))
    sink.close()
    print("over")

    clear = "\r\x1b[K"
    assert terminal.getvalue() == (
        f"{short(FIRST)}{clear}{short(SECOND)}{clear}{SECOND}\nsaved\na warning\n"
        f"{short(FIRST)}{clear}{FIRST}\nover\n"
    )
    assert sys.stdout is terminal is sys.stderr


def short(line: str) -> str:
    """What fits into 30 columns: the step, and the speed."""
    fields = line.split("  ")
    return f"{fields[0]}  {fields[-1]}"


class FullFile(io.StringIO):
    """A file on a full disk: what is in its buffer can never be written."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    close = flush


def test_a_full_disk_ends_the_log_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = [str(tmp_path / "full.csv"), str(tmp_path / "whole.csv")]

    with piper.Trainer(
        nn.Linear(3, 3), functional.mse_loss, None, example=(X, X), device="cpu", log=logs
    ) as trainer:
        full: Any = trainer._log.sinks[0]
        full.file.close()
        full.file = FullFile()
        full.rows.writer = csv.writer(full.file)
        losses = [trainer.step(X, X).loss for _ in range(3)]

    assert caplog.text.count("full.csv cannot be written ([Errno 28]") == 1
    with open(logs[1], newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == losses


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(InputError, match=r"^log: .*\n  fix: give a file where you can write"):
        piper.Trainer(
            nn.Linear(3, 3), functional.mse_loss, None, example=(X, X), device="cpu",
            log=str(tmp_path / "file" / "metrics.csv"),
        )  # fmt: skip


def test_a_file_keeps_the_columns_that_it_has(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,tokens,loss\r\n1,8,2.5\r\n")

    log = metric_log(log_makers(file), rank=0)
    log.add(metrics(2))
    log.close()

    assert file.read_text().split() == ["step,tokens,loss", "1,8,2.5", "2,8,2.0"]


def test_weights_and_biases_gets_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda row, step: rows.append((step, row)), finish=lambda: rows.append("over")
    )
    fake = types.SimpleNamespace(run=None, init=lambda: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)

    log = metric_log(log_makers("wandb"), rank=0)
    log.add(metrics(1, lr=0.1, best_seconds=0.25))
    log.close()

    assert rows == [
        (1, {
            "step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "samples": 2, "tokens": 8,
            "seconds": 0.5, "samples_per_second": 4.0, "tokens_per_second": 16.0,
            "memory_gib": 0.25, "mfu": 0.5,
        }),
        "over",
    ]  # fmt: skip


def test_wrong_logs_are_an_error_before_anything_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def untraceable(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise AssertionError("captured")

    with pytest.raises(InputError, match="'prnit' is not a log"):
        piper.Trainer(nn.Linear(3, 3), untraceable, example=(X, X), log="prnit")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="wandb is not installed"):
        log_makers("wandb")
    with pytest.raises(InputError, match="'tensorbord' is not a log"):
        log_makers("tensorbord")


def test_flops_are_those_of_forward_and_backward() -> None:
    """A linear layer: 2 x rows x in x out, and twice that for both gradients."""
    captured = piper.capture.capture(
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)),
        functional.mse_loss, (torch.ones(4, 8), torch.ones(4, 8)),
    )  # fmt: skip

    assert model_flops(captured.model) == 2 * 4 * 8 * 8 * (2 + 3)  # x needs no gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(2)
        )
        for one in self.parameters():
            nn.init.normal_(one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with piper.annotate("L"):
                x = block(x)
        return x


def test_patterns_make_groups_without_decay() -> None:
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    draw = torch.Generator().manual_seed(1)
    data = [tuple(torch.randn(2, 4, 3, generator=draw).double()) for _ in range(3)]
    model = Net().double()
    named = dict(model.named_parameters())
    bare = [name for name in named if "bias" in name or name.endswith(".1.weight")]
    decayed = [one for name, one in named.items() if name not in bare]
    plain = {"params": [named[name] for name in bare], "weight_decay": 0.0}
    optimizer = adamw([{"params": decayed}, plain])
    for x, y in data:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    strategy = piper.strategies.one_f_one_b(pp=2, dp=2, microbatches=2, zero=3)
    found = piper.rehearse(
        Net().double(), functional.mse_loss, strategy, data, optimizer=adamw,
        no_decay=["bias", "blocks.*.1.WEIGHT"],
    )  # fmt: skip

    for name, wanted in model.named_parameters():
        torch.testing.assert_close(found.parameters[name], wanted.detach(), rtol=1e-9, atol=1e-12)


def test_a_pattern_of_no_parameter_is_an_error() -> None:
    with pytest.raises(InputError, match="no parameter has 'nrom' or 'ln_' in its name"):
        piper.Trainer(Net(), functional.mse_loss, example=(X, X), no_decay=["nrom", "ln_"])


@pytest.mark.soak
def test_one_list_of_patterns_serves_many_models(caplog: pytest.LogCaptureFixture) -> None:
    trainer = piper.Trainer(Net(), functional.mse_loss, example=(X, X), no_decay=["bias", "ln_"])
    trainer.evaluate([(X, X)])
    trainer.close()

    assert caplog.messages.count("no_decay: no parameter has 'ln_' in its name") == 1


def test_a_text_is_not_a_list_of_patterns() -> None:
    with pytest.raises(InputError, match="'bias' is not a list of names"):
        piper.Trainer(Net(), functional.mse_loss, example=(X, X), no_decay="bias")
