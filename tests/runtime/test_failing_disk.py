"""A disk that fails at any call of a save: it is told, and the checkpoint before is whole."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from checkpoints import alone, weights
from draws import drawn, draws, one_of
from replicas import data

from piper import Trainer
from piper.errors import InputError
from piper.runtime.checkpoint.summary import verified

CALLS = [
    (os, name) for name in ("open", "write", "fsync", "mkdir", "replace", "rename", "unlink",
                            "pwrite", "ftruncate", "rmdir")
] + [(io, "open")]  # fmt: skip
Disaster = Callable[[Path], None]


def error(number: int) -> Disaster:
    def fail(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def gone(folder: Path) -> None:
    """Somebody removes the folder of the run."""
    shutil.rmtree(folder, ignore_errors=True)


def read_only(folder: Path) -> None:
    """Somebody puts a file where the folder was."""
    gone(folder)
    folder.touch()


DISASTERS: dict[str, Disaster] = {
    "full": error(errno.ENOSPC), "broken": error(errno.EIO), "stale": error(errno.ESTALE),
    "read-only": error(errno.EROFS), "gone": gone, "a file": read_only,
}  # fmt: skip


@contextmanager
def disaster_at(
    number: int, disaster: Disaster, folder: Path, again: bool
) -> Iterator[Callable[[], int]]:
    """Inside, call `number` of the disk meets it; and all calls after it, if `again`."""
    numbers, busy = count(), [False]
    seen = [0]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            if busy[0]:
                return call(*args, **named)
            now = seen[0] = next(numbers)
            if now == number or (again and now > number):
                busy[0] = True
                try:
                    disaster(folder)
                finally:
                    busy[0] = False
            return call(*args, **named)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        yield lambda: seen[0]


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    made = alone()
    made.step(*data()[0])
    yield made
    made.close()


def saved_in_a_disaster(
    trainer: Trainer, folder: Path, number: int, disaster: Disaster, again: bool
) -> bool:
    """Whether the save was an error. It may work, if the call is one that need not."""
    with disaster_at(number, disaster, folder, again):
        try:
            trainer.save(folder, wait=number % 2 == 0)  # or in a thread, beside steps
            trainer._checkpoints.finish()
        except InputError:
            return True
    return False


def calls_of_a_save(trainer: Trainer, folder: Path) -> int:
    trainer.save(folder)
    with disaster_at(-1, gone, folder, False) as seen:
        trainer.save(folder)
        return seen() + 1


@one_of(2)
@drawn
@pytest.mark.parametrize("name", DISASTERS)
def test_a_save_is_whole_or_told(name: str, trainer: Trainer, tmp_path: Path) -> None:
    total = calls_of_a_save(trainer, tmp_path / "first")
    destroyed = name in ("gone", "a file")
    told = 0

    for number in range(len(name) % 4, total, draws(13, 1)):
        for again in (False, True):
            folder = tmp_path / f"{number}-{again}"
            trainer.save(folder)
            told += (failed := saved_in_a_disaster(trainer, folder, number, DISASTERS[name], again))
            if not destroyed:
                assert verified(folder)  # the new one, or the one before
            elif not failed and (folder / "piper.json").is_file():
                assert verified(folder)
            if folder.is_file():
                folder.unlink()
            trainer._checkpoints.close()
            trainer.save(folder)  # whatever is left, the next one works
            assert verified(folder)
            left = {one.name for one in folder.iterdir() if one.name.startswith(".")}
            assert destroyed or again or not left

    assert told > 0
    assert weights(trainer)
