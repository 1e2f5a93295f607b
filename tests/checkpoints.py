"""Jobs of the pool that save a run, or go on with one; in float64, as replicas.py has it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from replicas import ADAMW, Net, Run, batches, data, known, optimizer_parts
from shared_capture import one_model, using
from torch import nn
from torch.nn import functional

from piper import annotate
from piper.directives import Place, Split, Strategy
from piper.ir.filters import where
from piper.job.compile.division import feeds_of
from piper.runtime.checkpoint.format.files import written
from piper.runtime.state.device_state import Part
from piper.trainer import Trainer

ROWS, SAVED = 8, 2  # rows of all replicas; steps before a run is saved
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLACE = [Place(where(), [0])]
ALONE = one_model()
HALVING = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


class Branches(nn.Module):
    """Short batches go one way, long ones another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.short, self.long = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            with annotate("PP", 0):
                return self.long(x)
        with annotate("PP", 1):
            return self.short(x)


def made(rank: int, name: str, stages: int, text: str, **options: Any) -> tuple[Trainer, Any]:
    """A Trainer of the strategy, and this process's part of every batch."""
    strategy = Strategy.from_json(text)
    feeds = feeds_of(strategy)
    parts = strategy.microbatches * len(feeds.teams)
    model, loss_fn, found = known(rank, name, stages, ROWS // parts)
    mine = [
        tuple(t.chunk(len(feeds.feeds))[feeds.feed(rank)] for t in batch)
        for batch in batches(name, ROWS)
    ]
    options = {"optimizer": ADAMW, **options}
    with using(found):
        return Trainer(model, loss_fn, strategy, example=mine[0], **options), mine


def alone(*middle: nn.Module, **options: Any) -> Trainer:
    """A Trainer of a small model in this process."""
    given = {"example": data()[0], "device": "cpu", "seed": 3, **options}
    with nullcontext() if middle else ALONE():
        return Trainer(Net(*middle), functional.mse_loss, [Split("MB", 2), *PLACE], **given)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = trainer.state_dict()
    assert found is not None
    return {name: tensor.clone() for name, tensor in found.items()}


def save_half(rank: int, name: str, stages: int, text: str, folder: str) -> None:
    trainer, mine = made(rank, name, stages, text)
    for batch in mine[:SAVED]:
        trainer.step(*batch)
    trainer.save(folder)
    trainer.close()


def go_on(rank: int, name: str, stages: int, text: str, folder: str) -> Run:
    trainer, mine = made(rank, name, stages, text)
    assert trainer.resume(folder) == SAVED
    run = Run()
    for batch in mine[SAVED:]:
        run.loss.append(trainer.step(*batch).loss)
    run.parameters = [
        Part(p.name, p.first, p.shape, p.values.clone(), p.order)
        for p in trainer._programs.state.parts()
    ]
    run.optimizer = optimizer_parts(trainer._programs.state)
    trainer.close()
    return run


def refused_there(rank: int, text: str, folder: str, missing_ok: bool) -> str:
    """What a process says that looks for a checkpoint where there is none, or another."""
    trainer, _ = made(rank, "uneven", 2, text)
    try:
        trainer.resume(f"{folder}/{rank}", missing_ok)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return "nothing"


def save_unseen(rank: int, text: str, folder: str) -> tuple[str, int]:
    """The second process is on a host that does not share the folder; after a save that worked."""
    trainer, mine = made(rank, "uneven", 2, text)
    trainer.save(folder)
    trainer.step(*mine[0])
    apart = (lambda path: False) if rank else Path.is_file
    with (
        patch.object(Path, "is_file", apart),
        patch("piper.runtime.checkpoint.save.SHOWN", 0.1),
    ):
        said = saying(lambda: trainer.save(folder))
    trainer.close()
    return said, len(list(Path(folder).iterdir()))


def save_in_vain(rank: int, text: str, folder: str) -> list[str]:
    """The second process cannot write: what each says in the steps that follow."""
    trainer, mine = made(rank, "uneven", 2, text)
    trainer.step(*mine[0])
    with patch("piper.runtime.checkpoint.format.files.written", full if rank else written):
        trainer.save(folder, wait=False)
        thread = trainer._checkpoints.thread
        assert thread is not None
        thread.join()
    said = [saying(lambda: trainer.step(*mine[1])) for _ in range(2)]
    trainer.save(folder, wait=False)
    trainer.close()
    return said


def save_otherwise(rank: int, text: str, folder: str, options: dict[str, Any]) -> str:
    """The second process saves with other options."""
    trainer, mine = made(rank, "uneven", 2, text)
    trainer.step(*mine[0])
    said = saying(lambda: trainer.save(folder, **(options if rank else {})))
    trainer.close()
    return said


def full(*given: Any) -> int:
    raise OSError(28, "No space left on device")


def saying(act: Callable[[], Any]) -> str:
    """Its error, or nothing."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_often(folder: str, trainer: Trainer | None = None) -> None:
    """Steps and saves beside them, until someone ends the process."""
    trainer = trainer or alone(optimizer=MOMENTUM)
    for batch in cycle(data()):
        trainer.step(*batch)
        trainer.save(folder, wait=False, keep=2)


def save_and_be_killed(folder: str, kills: int, seed: int) -> None:
    """Processes that save often, each to its own folder, killed after a random time."""
    trainer, draw = alone(optimizer=MOMENTUM), random.Random(seed)
    for kill in range(kills):
        run = Path(folder) / str(kill)
        pid = os.fork()
        if pid == 0:
            save_often(str(run), trainer)
        while not (run / "piper.json").exists():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def export_half(rank: int, name: str, stages: int, text: str, folder: str) -> Any:
    """The weights after two steps, in files of a few tensors; and as a state dict."""
    trainer, mine = made(rank, name, stages, text)
    for batch in mine[:SAVED]:
        trainer.step(*batch)
    trainer.export(folder, max_file_gib=2e-6)
    found = trainer.state_dict()
    trainer.close()
    return found


def load_there(rank: int, name: str, stages: int, text: str, folder: str) -> Any:
    trainer, mine = made(rank, name, stages, text)
    trainer.load(folder)
    found = trainer.state_dict()
    trainer.step(*mine[0])
    trainer.close()
    return found


def retarget_often(rank: int, name: str, stages: int, texts: list[str]) -> tuple[Run, list[Any]]:
    """Every step under another strategy; and what moved in between, with what had to."""
    trainer, _ = made(rank, name, stages, texts[0])
    run, moved = Run(), []
    for text, batch in zip(texts, batches(name, ROWS), strict=True):
        if text != texts[0] or run.loss:
            before = owned_elements(trainer)
            sent = trainer.retarget(Strategy.from_json(text))
            moved.append((sent, *missing_elements(trainer, before)))
        mine = tuple(t.chunk(trainer.replicas)[trainer.replica] for t in batch)
        run.loss.append(trainer.step(*mine).loss)
    state = trainer._programs.state
    run.parameters = [
        Part(p.name, p.first, p.shape, p.values.clone(), p.order) for p in state.parts()
    ]
    run.optimizer = optimizer_parts(state)
    trainer.close()
    return run, moved


Elements = dict[tuple[str, str], set[int]]  # of a parameter or a state of its optimizer


def owned_elements(trainer: Trainer) -> Elements:
    """What this device holds at home, element by element."""
    programs = trainer._programs
    home = {value: programs.state.buckets[value] for value in programs.turns}
    return elements_of(home.values())


def elements_of(buckets: Any) -> Elements:
    found: Elements = {}
    for bucket in buckets:
        for name, first, shape, parameter, order in bucket.parts():
            there = order.indices(shape)[first : first + parameter.numel()].tolist()
            found.setdefault((name, ""), set()).update(there)
            held = bucket.optimizer.state.get(parameter, {}) if bucket.optimizer else {}
            for state, value in held.items():
                single = state == "step" or value.shape != parameter.shape
                where = range(value.numel()) if single else there
                found.setdefault((name, state), set()).update(where)
    return found


def missing_elements(trainer: Trainer, before: Elements) -> tuple[int, int]:
    """Elements that a device has now and had not before: all, and those that are float32."""
    now = elements_of(trainer._programs.state.buckets.values())
    counts = {key: len(there - before.get(key, set())) for key, there in now.items()}
    return sum(counts.values()), sum(n for (_, state), n in counts.items() if state == "step")


def forgetful(rank: int, count: int, rows: list[int]) -> list[float]:
    """Losses with batches of several shapes, on two stages."""
    strategy = Strategy([Place(where(PP=0), [0]), Place(where(PP=1), [1])])
    full = data()[0]
    trainer = Trainer(
        Net(), functional.mse_loss, strategy, example=full, device="cpu", max_programs=count
    )
    found = [trainer.step(*(tensor[:many] for tensor in full)).loss for many in rows]
    assert len(trainer._programs.ready) <= count
    trainer.close()
    return found
