"""Saving beside steps, next to other runs, and up to the moment at which a process is killed."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import random
import threading
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    MOMENTUM,
    alone,
    full,
    save_and_be_killed,
    save_half,
    save_in_vain,
    save_often,
    save_otherwise,
    save_unseen,
    weights,
)
from pool import HEAVY, run_on
from replicas import data
from torch import nn

from piper import Place, Replicate, Split, Strategy, Trainer, where
from piper.errors import InputError, PeerLost
from piper.runtime.checkpoint.folder import kept_in
from piper.runtime.checkpoint.resume import reader_of
from piper.runtime.checkpoint.writer import write_pieces

TWO = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1]), Split("MB", 2)])


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is what was there when it was saved."""
    gate, batches = threading.Event(), [*data(), *data()]

    def later(*given: Any) -> Any:
        gate.wait()
        return write_pieces(*given)

    monkeypatch.setattr("piper.runtime.checkpoint.save.write_pieces", later)
    first = alone(nn.Dropout(0.4), optimizer=MOMENTUM)
    first.step(*batches[0])
    first.save(tmp_path / "run", wait=False)
    wanted = [first.step(*batch).loss for batch in batches[1:]]
    assert not (tmp_path / "run" / "piper.json").exists()
    gate.set()
    first.close()

    second = alone(nn.Dropout(0.4), optimizer=MOMENTUM)
    assert second.resume(tmp_path / "run") == 1
    assert [second.step(*batch).loss for batch in batches[1:]] == wanted
    second.close()


@pytest.mark.parametrize("call", ["step", "save", "close"])
def test_an_error_is_raised_by_the_next_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, folder = alone(), tmp_path / "run"
    trainer.save(folder)
    trainer.step(*data()[0])
    with monkeypatch.context() as patch:
        patch.setattr("piper.runtime.checkpoint.format.files.written", full)
        trainer.save(folder, wait=False)
        assert trainer._checkpoints.thread is not None
        trainer._checkpoints.thread.join()

    calls = {"step": lambda: trainer.step(*data()[0]), "save": lambda: trainer.save(folder),
             "close": trainer.close}  # fmt: skip
    with pytest.raises(InputError, match="No space left on device"):
        calls[call]()

    assert [one.steps for one in kept_in(folder)] == [0]
    assert sorted(path.name for path in folder.iterdir()) == ["piper.json", "piper.lock", "step-0"]
    trainer.close() if call == "close" else calls[call]()  # it was raised once
    trainer.close()


def test_what_fails_on_one_process_is_raised_by_all_in_the_same_step(tmp_path: Path) -> None:
    first, second = run_on(2, save_in_vain, TWO.to_json(), str(tmp_path / "run"))

    assert "on device 1, " in first[0] and first[0].count("fix:") == 1
    assert "No space left on device" in second[0]
    assert first[1] == second[1] == ""
    assert [one.steps for one in kept_in(tmp_path / "run")] == [2]


def test_a_folder_that_a_host_does_not_see_is_noticed_in_time(tmp_path: Path) -> None:
    """The old checkpoint is still there, and nothing beside it."""
    (first, left), (second, _) = run_on(2, save_unseen, TWO.to_json(), str(tmp_path / "run"))

    assert "step-1 was made by device 0, and is not seen here" in second
    assert "on device 1, " in first
    assert left == 3
    assert [one.steps for one in kept_in(tmp_path / "run")] == [0]


def test_copies_divide_the_writing(tmp_path: Path) -> None:
    run_on(2, save_half, "uneven", 2, TWO.to_json(), str(tmp_path / "run"))

    sizes = [
        sum(one.nbytes for one in reader_of(tmp_path / "run").index.pieces if one.file == name)
        for name in ("0.safetensors", "1.safetensors")
    ]
    assert 0 < max(sizes) < 2 * min(sizes)


def test_the_newest_stay_and_every_third(tmp_path: Path) -> None:
    trainer, folder = alone(), tmp_path / "run"
    for batch in islice(cycle(data()), 8):
        trainer.step(*batch)
        trainer.save(folder, keep=2, keep_every=3, wait=False)
    trainer.close()

    assert [one.steps for one in kept_in(folder)] == [3, 6, 7, 8]
    assert sorted(path.name for path in folder.glob("step-*")) == [
        "step-3", "step-6", "step-7", "step-8",
    ]  # fmt: skip
    older = alone()
    assert older.resume(folder / "step-3") == 3
    with pytest.raises(InputError, match="keep nothing"):
        older.save(folder, keep=0)


class Positions:
    """A loader that knows where it is. Its batches also depend on the random state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, 3: (b"bytes", None, [1.5, torch.arange(2)])}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[3][0] == b"bytes" and state[3][2][1].tolist() == [0, 1]
        self.at = state["at"]

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = data()[self.at % len(data())]
        self.at += 1
        return x + torch.randn_like(x) * random.random(), y


def test_the_data_goes_on_where_it_was(tmp_path: Path) -> None:
    """The position of a loader, and the random state; after a run that drew other numbers."""
    torch.manual_seed(5)
    random.seed(5)
    first, loader = alone(), Positions()
    for _ in range(2):
        first.step(*next(loader))
    first.save(tmp_path / "run", loader=loader)
    wanted = [first.step(*next(loader)).loss for _ in range(2)]
    first.close()

    torch.manual_seed(6)
    second, fresh = alone(), Positions()
    second.resume(tmp_path / "run", loader=fresh)
    assert [second.step(*next(fresh)).loss for _ in range(2)] == wanted
    second.close()


def test_a_loader_without_a_position_is_refused(tmp_path: Path) -> None:
    trainer = alone()
    with pytest.raises(InputError, match="loader=list has no state_dict"):
        trainer.save(tmp_path / "run", loader=data())
    trainer.save(tmp_path / "run")
    with pytest.raises(InputError, match="has no position of a loader"):
        trainer.resume(tmp_path / "run", loader=Positions())
    odd = Positions()
    odd.state_dict = lambda: {"at": object()}  # type: ignore[method-assign]
    with pytest.raises(InputError, match="contains an object, which cannot be saved safely"):
        trainer.save(tmp_path / "run", loader=odd)
    trainer.close()


# Other runs


def process(target: Any, *args: Any) -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    made = context.Process(target=target, args=args, daemon=True)
    made.start()
    return made


def begun(target: Any, run: Path) -> Any:
    """A process that has saved at least once."""
    child = process(target, str(run))
    while not (run / "piper.json").exists():
        assert child.is_alive()
        time.sleep(0.01)
    return child


def is_whole(run: Path, found: Trainer, states: States) -> None:
    """The state after as many steps as it says; and the folder can be saved to again."""
    found.steps = 0
    steps, ours = found.resume(run), weights(found)
    wanted = states.after(steps)
    assert all(torch.equal(ours[name], wanted[name]) for name in ours), run
    found.save(run)  # over whatever is left
    assert len(list(run.glob("step-*"))) == 1


class States:
    """The weights after so many steps of a run that nobody disturbs."""

    def __init__(self) -> None:
        self.trainer, self.batches = alone(optimizer=MOMENTUM), cycle(data())
        self.known: list[Any] = []

    def after(self, steps: int) -> Any:
        while len(self.known) < steps:
            self.trainer.step(*next(self.batches))
            self.known.append(weights(self.trainer))
        return self.known[steps - 1]


def test_a_kill_beside_a_save_leaves_a_whole_checkpoint_and_no_lock(tmp_path: Path) -> None:
    """As long as the first run lives, a second one is told who it is."""
    states, found, run = States(), alone(optimizer=MOMENTUM), tmp_path / "run"
    child = begun(save_often, run)

    with pytest.raises(InputError, match=f"is in use by process {child.pid} of "):
        found.save(run)
    child.kill()
    child.join()

    is_whole(run, found, states)
    found.close()


@pytest.mark.soak
def test_200_kills_beside_saves_leave_whole_checkpoints(tmp_path: Path) -> None:
    states, found = States(), alone(optimizer=MOMENTUM)
    child = process(save_and_be_killed, str(tmp_path), 200, 2)
    child.join()

    assert len(list(tmp_path.iterdir())) == 200
    for run in tmp_path.iterdir():
        is_whole(run, found, states)
    found.close()


@pytest.mark.parametrize(
    "after",
    [
        "piper.runtime.checkpoint.save.complete",  # a peer ended then
        "piper.runtime.checkpoint.save.finish",
        "piper.runtime.checkpoint.folder.replace_file",
        "piper.runtime.checkpoint.folder.remove",
        "piper.runtime.checkpoint.save.write_new",
        "piper.runtime.checkpoint.save.share",
    ],
)
def test_a_failure_at_the_end_of_a_save_loses_nothing(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older checkpoint may be gone by then, so the new one must stay."""
    trainer, folder = alone(), tmp_path / "run"
    trainer.save(folder)
    trainer.step(*data()[0])
    module, _, name = after.rpartition(".")
    real = getattr(importlib.import_module(module), name)

    def fail(*given: Any) -> None:
        real(*given)
        raise PeerLost(0, "a checkpoint", "Connection closed by peer", 1)

    with monkeypatch.context() as patched, pytest.raises(PeerLost):
        patched.setattr(after, fail)
        trainer.save(folder)
    trainer.close()

    again = alone()
    complete = any(one in after for one in ("complete", "finish", "replace_file", "remove"))
    assert again.resume(folder) == int(complete)
    again.close()


def one_device(optimizer: Any = None) -> Trainer:
    torch.manual_seed(0)
    x = torch.ones(4, 4)
    given = {} if optimizer is None else {"optimizer": optimizer}
    model = nn.Linear(4, 4)
    return Trainer(model, nn.functional.mse_loss, None, example=(x, x), device="cpu", **given)


def saved(folder: Path, optimizer: Any = None) -> None:
    with one_device(optimizer) as trainer:
        trainer.step(torch.ones(4, 4), torch.zeros(4, 4))
        trainer.save(folder)


OF_TORCH = torch.optim
MORE: dict[str, tuple[Any, Any, str]] = {
    "amsgrad": (OF_TORCH.AdamW, partial(OF_TORCH.AdamW, amsgrad=True), "max_exp_avg_sq"),
    "centered": (OF_TORCH.RMSprop, partial(OF_TORCH.RMSprop, centered=True), "grad_avg"),
    "momentum": (OF_TORCH.RMSprop, partial(OF_TORCH.RMSprop, momentum=0.9), "momentum_buffer"),
}


@pytest.mark.parametrize("option", MORE)
def test_an_option_that_keeps_more_than_was_saved_is_refused(option: str, tmp_path: Path) -> None:
    before, after, missing = MORE[option]
    saved(tmp_path / "run", before)

    with one_device(after) as trainer:
        with pytest.raises(InputError, match=f"has no {missing}, which"):
            trainer.resume(tmp_path / "run")
        trainer.load(tmp_path / "run")
        trainer.step(torch.ones(4, 4), torch.zeros(4, 4))
    with one_device(before) as trainer:
        assert trainer.resume(tmp_path / "run") == 1


def test_states_may_have_other_names_for_vectors_than_for_matrices(tmp_path: Path) -> None:
    saved(tmp_path / "run", torch.optim.Adafactor)

    with one_device(torch.optim.Adafactor) as trainer:
        assert trainer.resume(tmp_path / "run") == 1
        resumed = [trainer.step(torch.ones(4, 4), torch.zeros(4, 4)).loss for _ in range(2)]
    with one_device(torch.optim.Adafactor) as trainer:
        whole = [trainer.step(torch.ones(4, 4), torch.zeros(4, 4)).loss for _ in range(3)]
    assert resumed == whole[1:]


def test_a_momentum_that_is_added_begins_at_zero(tmp_path: Path) -> None:
    saved(tmp_path / "run", partial(torch.optim.SGD, lr=0.1))

    with one_device(partial(torch.optim.SGD, lr=0.1, momentum=0.9)) as trainer:
        assert trainer.resume(tmp_path / "run") == 1
        trainer.step(torch.ones(4, 4), torch.zeros(4, 4))


def test_a_longer_run_is_not_lost_to_one_that_has_not_resumed_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, x = tmp_path / "run", torch.ones(4, 4)
    for steps in (3, 1):
        with one_device() as trainer:
            for _ in range(steps):
                trainer.step(x, x)
            trainer.save(folder)
            trainer.step(x, x)
            trainer.save(folder)

    assert caplog.text.count("has step-4 of a longer run, which stays") == 1
    assert sorted(one.name for one in folder.glob("step-*")) == ["step-2", "step-4"]
    for place, steps in ((folder, 2), (folder / "step-4", 4)):
        with one_device() as trainer:
            assert trainer.resume(place) == steps
            trainer.step(x, x)
            trainer.save(folder)
    assert caplog.text.count("of a longer run") == 1


def test_a_run_does_not_begin_anew_beside_a_checkpoint_that_nothing_points_to(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "run")
    (tmp_path / "run" / "piper.json").unlink()

    with one_device() as trainer:
        with pytest.raises(InputError, match="has step-1, and no piper.json"):
            trainer.resume(tmp_path / "run", missing_ok=True)
        assert trainer.resume(tmp_path / "run" / "step-1") == 1


WRONG_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no folder": ("save", {"folder": None}, "NoneType, and not a path"),
    "a number to resume": ("resume", {"folder": 5}, "int, and not a path"),
    "bytes": ("export", {"folder": b"x"}, "bytes, and not a path"),
    "keep": ("save", {"folder": "x", "keep": "2"}, "keep='2' is not a number"),
    "a part": ("save", {"folder": "x", "keep": 1.5}, "keep=1.5 is not a number"),
    "every": ("save", {"folder": "x", "keep_every": 1.5}, "keep_every=1.5 is not a number"),
    "rename": ("load", {"path": "x", "rename": 5}, "rename=5 is not a function"),
    "only": ("export", {"folder": "x", "only": "head"}, "only='head' is not a function"),
    "size": ("export", {"folder": "x", "max_file_gib": "x"}, "max_file_gib='x' is not a size"),
    "no size": ("export", {"folder": "x", "max_file_gib": 0}, "max_file_gib=0 is not a size"),
}


def test_wrong_arguments_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with one_device() as trainer:
        for call, given, words in WRONG_CALLS.values():
            with pytest.raises(InputError, match=words):
                getattr(trainer, call)(**given)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"keep": 2}, {"keep_every": 4}, {"wait": False}], ids=str)
def test_processes_save_in_the_same_way(options: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = options.items()

    said = run_on(2, save_otherwise, TWO.to_json(), str(tmp_path / "run"), options)

    assert all(f"device 1 saves with {name}={value!r}, device 0 with " in one for one in said)
    assert not (tmp_path / "run").exists()
