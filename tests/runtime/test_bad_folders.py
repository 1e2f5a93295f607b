"""Paths that lead nowhere, folders of the user and full disks are told, and do no harm."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import alone
from draws import SOAK, one_of
from replicas import data

from piper import Trainer
from piper.errors import InputError

Act = Callable[[Trainer, Path], object]
CALLS: dict[str, Act] = {
    "save": lambda trainer, path: trainer.save(path),
    "resume": lambda trainer, path: trainer.resume(path),
    "resume missing_ok": lambda trainer, path: trainer.resume(path, missing_ok=True),
    "load": lambda trainer, path: trainer.load(path),
    "export": lambda trainer, path: trainer.export(path),
}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    found = alone()
    yield found
    found.close()


def bad_paths(folder: Path) -> dict[str, Path]:
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "file").write_text("mine")
    return {
        "links in a circle": folder / "loop", "below a file": folder / "file" / "x",
        "a file": folder / "file", "a zero byte": folder / "a\0b", "too long": folder / ("x" * 300),
        "no folder of a disk": Path("/proc/x"),
    }  # fmt: skip


def allowed(call: str, path: str) -> bool:
    """Where nothing is, a run may start anew."""
    return call == "resume missing_ok" and path == "no folder of a disk"


@one_of(2)
@pytest.mark.parametrize("call", CALLS)
def test_paths_that_lead_nowhere_are_told(call: str, trainer: Trainer, tmp_path: Path) -> None:
    for name, path in bad_paths(tmp_path).items():
        try:
            CALLS[call](trainer, path)
        except InputError:
            assert not allowed(call, name), name
        else:
            assert allowed(call, name), name

    assert (tmp_path / "file").read_text() == "mine"
    assert {one.name for one in tmp_path.iterdir()} == {"loop", "file"}


@pytest.mark.parametrize("call", [call for call in CALLS if call != "load"])
@pytest.mark.parametrize("below", ["", "more"])
def test_a_file_where_a_folder_is_needed_is_named(
    call: str, below: str, trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "data.py").write_text("mine")

    with pytest.raises(InputError) as found:
        CALLS[call](trainer, tmp_path / "data.py" / below)

    where = "export" if call == "export" else "checkpoint"
    assert str(found.value) == (
        f"{where}: {tmp_path / 'data.py'} is a file, and not a folder\n  fix: choose another path"
    )


@pytest.mark.parametrize("call", ["save", "resume", "resume missing_ok"])
def test_a_folder_of_the_user_is_told_before_training(
    call: str, trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match="is not a checkpoint|and no checkpoint"):
        CALLS[call](trainer, tmp_path)

    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond this size."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_the_checkpoint_before(wait: bool, tmp_path: Path) -> None:
    trainer, folder = alone(), tmp_path / "run"
    trainer.save(folder)
    trainer.step(*data()[0])

    for size in (0, 100, 1000, 4096) if SOAK else (0, 1000):
        with full_disk(size), pytest.raises(InputError, match="enough free space"):
            trainer.save(folder, wait=wait)
            trainer._checkpoints.finish()
        assert {one.name for one in folder.iterdir()} == {"piper.json", "piper.lock", "step-0"}

    trainer.save(folder)
    trainer.close()
    again = alone()
    assert again.resume(folder) == 1
    again.close()


def test_an_export_to_a_full_disk_leaves_nothing(trainer: Trainer, tmp_path: Path) -> None:
    for size in (0, 10, 100):
        with full_disk(size), pytest.raises(InputError, match="enough free space"):
            trainer.export(tmp_path / "weights")

    assert [*(tmp_path / "weights").iterdir()] == []


@pytest.mark.parametrize("name", ["a\nb", "\udcff", "-rf", "a b'\"$(id)", "ü☃"], ids=ascii)
def test_odd_names_are_names(name: str, trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(tmp_path / name)

    again = alone()
    assert again.resume(tmp_path / name) == 0
    again.close()
