"""A run that was saved goes on as if nothing had happened, under whatever strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    HALVING,
    PLACE,
    SAVED,
    Branches,
    alone,
    go_on,
    made,
    refused_there,
    save_half,
)
from draws import every
from pool import run_on
from replicas import Net, compare, data, plain
from torch import nn
from torch.nn import functional

from piper import Place, Replicate, Split, Strategy, Trainer, where
from piper.errors import InputError
from piper.runtime.checkpoint.pieces import warn_of_rates
from piper.strategies import BUILDERS

ONE = Strategy([Place(where(), [0]), Split("MB", 4)])
TWO = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1], zero=1), Split("MB", 2)])
PAIRS = Replicate(where(), [[0, 1], [2, 3]], zero=3, bucket_mb=1e-4)
HYBRID = Strategy([Place(where(), [0, 1, 2, 3]), PAIRS, Split("MB", 1)])


UNEQUAL = Strategy([
    Place(where(PP=0), [0, 1]), Replicate(where(PP=0), [0, 1], zero=1), Place(where(PP=1), [2]),
    Split("MB", 2),
])  # fmt: skip


def pipeline(schedule: str = "1f1b", zero: int = 3, **options: Any) -> Strategy:
    return BUILDERS[schedule](pp=2, microbatches=2, dp=2, zero=zero, **options)


def divided(tp: int, dp: int = 1, zero: int = 0) -> Strategy:
    return BUILDERS["1f1b"](pp=1, microbatches=4 // dp, tp=tp, dp=dp, zero=zero)


TOKENS = BUILDERS["1f1b"](pp=1, microbatches=4, cp=4, cp_attention="zigzag", zero=1)
GROUPS = BUILDERS["1f1b"](pp=2, microbatches=2, dp=[1, 2], tp=2, zero=2)


def world(strategy: Strategy) -> int:
    return 1 + max(d for one in strategy if isinstance(one, Place) for d in one.devices)


CASES = {
    "shards to one": ("uneven", pipeline(), ONE),
    "one to shards": ("uneven", ONE, pipeline()),
    "shards to other shards": ("uneven", TWO, HYBRID),
    "hybrid to a pipeline of copies": ("uneven", HYBRID, pipeline(zero=0)),
    "unequal stages to a device": ("uneven", UNEQUAL, ONE),
    "shards to unequal stages": ("uneven", TWO, UNEQUAL),
    "the same, tied": ("llama", pipeline(zero=2), pipeline(zero=2)),
    "experts together": ("moe spread", pipeline(zero=1, ep=2), TWO),
    "experts apart": ("moe spread", TWO, pipeline(zero=3, ep=2)),
    "two devices to a group, to four": ("wide", divided(2, dp=2, zero=1), divided(4, zero=3)),
    "four devices to a group, to none": ("wide", divided(4), ONE),
    "from none to two": ("wide", ONE, divided(2, dp=2, zero=2)),
    "weights to tokens": ("wide", divided(4, zero=3), TOKENS),
    "tokens to ranks with one group and two": ("wide", TOKENS, GROUPS),
}


@pytest.mark.parametrize(("model", "before", "after"), every(10, CASES.values(), CASES))
def test_a_run_goes_on(model: str, before: Strategy, after: Strategy, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")

    run_on(world(before), save_half, model, 2, before.to_json(), folder)
    runs = run_on(world(after), go_on, model, 2, after.to_json(), folder)

    reference = plain(model, 2, 8, 4)
    for run in runs:
        torch.testing.assert_close(run.loss, reference.loss[SAVED:], rtol=1e-12, atol=0.0)
    compare([run.parameters for run in runs], reference.parameters, "parameter")
    for key, parts in reference.optimizer.items():
        compare([run.optimizer[key] for run in runs if key in run.optimizer], parts, key)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,  # whose states have other shapes than parameters
    **{
        kind: partial(getattr(torch.optim, kind), lr=1e-2)
        for kind in ("AdamW", "NAdam", "RAdam", "ASGD", "Rprop", "Adagrad", "RMSprop")
    },
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "fused": partial(torch.optim.Adam, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("optimizer", every(4, OPTIMIZERS.values(), OPTIMIZERS))
def test_to_the_bit(optimizer: Any, tmp_path: Path) -> None:
    """Dropout, learning rates and the states of optimizers."""
    options = {"optimizer": optimizer, "lr_scheduler": HALVING}
    batches, folder = [*data(), *data()], tmp_path / "deep" / "run"

    whole = alone(nn.Dropout(0.4), **options)
    wanted = [whole.step(*batch).loss for batch in batches]
    first = alone(nn.Dropout(0.4), **options)
    found = [first.step(*batch).loss for batch in batches[:2]]
    first.save(folder)
    second = alone(nn.Dropout(0.4), **options)
    assert second.resume(folder) == 2
    found += [second.step(*batch).loss for batch in batches[2:]]

    assert found == wanted
    ours, theirs = second.state_dict(), whole.state_dict()
    assert ours and theirs and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for trainer in (whole, first, second):
        trainer.close()


def test_buffers_are_saved(tmp_path: Path) -> None:
    first = alone(nn.BatchNorm1d(6))
    first.step(*data()[0])
    first.save(tmp_path / "run")
    second = alone(nn.BatchNorm1d(6))
    second.resume(tmp_path / "run")

    ours, theirs = first.state_dict(), second.state_dict()
    assert ours and theirs
    assert ours["middle.0.running_mean"].abs().sum() > 0
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_older_checkpoint_stays_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trainer = tmp_path / "run", alone()
    trainer.save(folder)
    trainer.step(*data()[0])

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(InputError) as refused:
        patch.setattr("piper.runtime.checkpoint.folder.replace_file", full)
        trainer.save(folder)
    assert "No space left on device" in str(refused.value)
    assert json.loads((folder / "piper.json").read_text())["steps"] == 0

    trainer.save(folder)
    assert json.loads((folder / "piper.json").read_text())["steps"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("piper.runtime.checkpoint.format.files.written", full)

    with pytest.raises(InputError) as refused:
        alone().save(tmp_path / "run")

    assert str(refused.value).startswith("checkpoint: [Errno 28] No space left on device\n  fix: ")


def test_where_nothing_is_a_run_may_begin(tmp_path: Path) -> None:
    assert alone().resume(tmp_path / "run", missing_ok=True) == 0
    with pytest.raises(InputError, match="is not a checkpoint"):
        alone().resume(tmp_path / "run")


def test_what_is_no_checkpoint_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, "."):
        with pytest.raises(InputError, match="is a file|has other files, and no checkpoint"):
            alone().save(folder)

    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def wider(width: int) -> Net:
    return Net(width=width)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: Net(nn.Linear(6, 6).double()),
            "middle.0.bias is missing from the checkpoint; the model has float64 [6]",
        ),
        (
            partial(wider, 4),
            "first.bias is float64 [6] in the checkpoint; the model has float64 [4]",
        ),
        (
            partial(wider, 8),
            "first.bias is float64 [6] in the checkpoint; the model has float64 [8]",
        ),
        (
            lambda: Net().float(),
            "first.bias is float64 [6] in the checkpoint; the model has float32 [6]",
        ),
    ],
)
def test_another_model_is_refused(model: Callable[[], Net], message: str, tmp_path: Path) -> None:
    alone().save(tmp_path / "run")
    built = model()
    x = torch.zeros(4, built.first.in_features, dtype=built.first.weight.dtype)
    trainer = Trainer(built, functional.mse_loss, PLACE, example=(x, x), device="cpu")

    with pytest.raises(InputError) as refused:
        trainer.resume(tmp_path / "run")

    assert str(refused.value) == (
        f"checkpoint: {tmp_path / 'run'} belongs to another model: {message}\n"
        "  fix: build the model that was saved"
    )


def test_a_model_with_less_is_refused(tmp_path: Path) -> None:
    alone(nn.Linear(6, 6).double()).save(tmp_path / "run")

    with pytest.raises(InputError, match="the model has no such tensor"):
        alone().resume(tmp_path / "run")


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = alone(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    trainer.step(*data()[0])
    trainer.save(tmp_path / "run")

    with pytest.raises(InputError, match="was saved with SGD, not with AdamW"):
        alone().resume(tmp_path / "run")


class Counting(torch.optim.SGD):
    """Counts in its groups, which belong to no parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


def test_other_options_of_the_optimizer_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "piper"]

    caplog.set_level("WARNING", logger="piper")
    first = alone(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    first.step(*data()[0])
    first.save(tmp_path / "run")

    alone(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)).resume(tmp_path / "run")
    assert not told()
    alone(optimizer=partial(torch.optim.SGD, lr=0.2, fused=True)).resume(tmp_path / "run")

    assert told() == [
        "the optimizer's lr was 0.1 when this was saved, and is 0.2 now",
        "the optimizer's momentum was 0.9 when this was saved, and is 0 now",
    ]


def test_an_optimizer_that_counts_in_its_groups_is_refused(tmp_path: Path) -> None:
    trainer = alone(optimizer=partial(Counting, lr=0.1))
    trainer.step(*data()[0])

    with pytest.raises(InputError, match="the optimizer's groups changed during training"):
        trainer.save(tmp_path / "run")


@pytest.mark.parametrize("again", ["resume", "retarget"])
def test_rates_that_the_loop_sets_are_said_to_be_lost(
    again: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a loop that computes the rate of each step."""
    warn_of_rates.cache_clear()
    batches, made = [data()[0]] * 6, list[torch.optim.Optimizer]()

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(named, lr=0.1, momentum=0.9))
        return made[-1]

    def steps(trainer: Trainer, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last):
            for one in made:
                one.param_groups[0]["lr"] = 0.1 / (step + 1)
            found.append(float(trainer.step(*batches[step]).loss))
        return found

    wanted = steps(alone(optimizer=optimizer), 0, 6)
    first = alone(optimizer=optimizer)
    losses = steps(first, 0, 3)
    with caplog.at_level("WARNING", logger="piper"):
        if again == "resume":
            first.save(tmp_path / "run")
            first = alone(optimizer=optimizer)
            first.resume(tmp_path / "run")
        else:
            first.retarget([Place(where(), [0]), Split("MB", 2)])
    losses += steps(first, 3, 6)

    assert losses == pytest.approx(wanted, rel=1e-6)
    assert caplog.text.count("your loop has changed the optimizer's lr") == 1


def test_a_scheduler_that_adds_a_rate_may_be_saved(tmp_path: Path) -> None:
    def averaged(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.5, anneal_epochs=4)

    def made() -> Trainer:
        return alone(optimizer=partial(torch.optim.SGD, lr=0.1), lr_scheduler=averaged)

    whole, first, second = made(), made(), made()
    wanted = [float(whole.step(*data()[0]).loss) for _ in range(6)]
    losses = [float(first.step(*data()[0]).loss) for _ in range(3)]
    first.save(tmp_path / "run")
    second.resume(tmp_path / "run")
    losses += [float(second.step(*data()[0]).loss) for _ in range(3)]

    assert losses == pytest.approx(wanted, rel=1e-6)


def test_what_is_not_used_again_is_saved_again(tmp_path: Path) -> None:
    """From checkpoint to checkpoint in one folder, though no step of the second run needs it."""

    def branches(rows: int) -> tuple[Trainer, Any]:
        batch = tuple(tensor[:rows] for tensor in data()[0])
        made = Trainer(Branches(), functional.mse_loss, example=batch, device="cpu")
        return made, batch

    folder = tmp_path / "run"
    first, long = branches(8)
    first.step(*long)
    first.save(folder)
    trained = first.state_dict()
    second, short = branches(4)
    second.resume(folder)
    second.step(*short)
    assert torch.equal(second.state_dict()["long.weight"], trained["long.weight"])  # type: ignore[index]
    second.save(folder)
    wanted = second.step(*long).loss
    third, _ = branches(4)
    third.resume(folder)

    assert torch.equal(third.state_dict()["long.weight"], trained["long.weight"])  # type: ignore[index]
    assert third.step(*long).loss == wanted


def test_only_a_new_trainer_resumes_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, folder = alone(), tmp_path / "run"
    with caplog.at_level("INFO", "piper"):
        trainer.resume(folder, missing_ok=True)
        trainer.step(*data()[0])
        trainer.save(folder)
        alone().resume(folder)

    assert f"no checkpoint in {folder} yet: starting at step 0" in caplog.messages
    assert f"resumed from {folder} at step 1" in caplog.messages

    with pytest.raises(InputError, match="has already run steps"):
        trainer.resume(tmp_path / "run")


@pytest.mark.parametrize("missing_ok", [False, True])
def test_all_processes_are_told_what_one_of_them_misses(missing_ok: bool, tmp_path: Path) -> None:
    """The second one looks elsewhere."""
    trainer, _ = made(0, "uneven", 2, ONE.to_json())
    trainer.save(tmp_path / "0")

    first, second = run_on(2, refused_there, TWO.to_json(), str(tmp_path), missing_ok)

    for rank, said in enumerate((first, second)):
        folder = tmp_path / str(rank)
        what = f"{folder} is not the same for all processes: device 1 finds none"
        assert said.startswith(f"InputError: checkpoint: {what}\n")
