"""What is damaged, foreign, missing or hostile is reported by name, and changes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import alone, weights
from replicas import data

from piper import Trainer
from piper.cli.checkpoint import show
from piper.errors import InputError
from piper.runtime.checkpoint.format.files import digest_of
from piper.runtime.checkpoint.format.safetensors_format import (
    NAMES,
    bytes_of,
    header_of,
    read_header,
)
from piper.runtime.checkpoint.format.sealed_json import sealed
from piper.runtime.checkpoint.format.strict_values import plain_name


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One that has made no step. Checkpoints that it refuses must leave it as it is."""
    made = alone()
    yield made
    made.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, saved after one step ("run"), and after two ("other")."""
    made, folder = alone(), tmp_path_factory.mktemp("saved")
    for name, batch in zip(("run", "other"), data(), strict=False):
        made.step(*batch)
        made.save(folder / name)
    made.close()
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of the one that was saved after one step."""
    return Path(shutil.copytree(saved / "run", tmp_path / "run"))


@contextmanager
def unchanged(trainer: Trainer) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Whatever is refused in here leaves the weights as they were."""
    before = weights(trainer)
    with pytest.raises(InputError) as refused:
        yield refused
    after = weights(trainer)
    assert trainer.steps == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def files_of(run: Path) -> list[Path]:
    """All that a resume reads: the lock says only who saves."""
    return sorted(path for path in run.rglob("*") if path.is_file() and path.name != "piper.lock")


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def every_flip_is_reported(run: Path, trainer: Trainer, count: int, seed: int) -> None:
    """Bits of all files, as if they were one."""
    draw, files = random.Random(seed), files_of(run)
    sizes = [8 * path.stat().st_size for path in files]
    for number in range(count):
        path = files[number % len(files)] if number < 2 * len(files) else None
        path = path or draw.choices(files, sizes)[0]
        bit = draw.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with unchanged(trainer) as refused:
            trainer.resume(run)
        assert str(path) in str(refused.value) or path.name == "piper.json", (path, bit)
        flip(path, bit)
    assert trainer.resume(run) == 1


def test_a_bit_that_flips_is_reported(run: Path) -> None:
    trainer = alone()
    every_flip_is_reported(run, trainer, 40, seed=1)
    trainer.close()


@pytest.mark.soak
def test_300_bits_that_flip_are_reported(run: Path) -> None:
    trainer = alone()
    every_flip_is_reported(run, trainer, 300, seed=2)
    trainer.close()


def test_a_missing_file_is_named(run: Path, trainer: Trainer) -> None:
    for path in files_of(run / "step-1"):
        content = path.read_bytes()
        path.unlink()
        with unchanged(trainer) as refused:
            trainer.resume(run)
        assert f"{path} is missing" in str(refused.value)
        path.write_bytes(content)


def test_a_file_of_another_checkpoint_is_named(run: Path, saved: Path, trainer: Trainer) -> None:
    """Also if it is of the same model, and whole by itself."""
    for mine in files_of(run / "step-1"):
        theirs = saved / "other" / "step-2" / mine.name
        if mine.name == "0.json":  # equal: nothing drew a random number
            assert mine.read_bytes() == theirs.read_bytes()
            continue
        content = mine.read_bytes()
        mine.write_bytes(theirs.read_bytes())
        with unchanged(trainer) as refused:
            trainer.resume(run)
        assert str(mine) in str(refused.value)
        mine.write_bytes(content)


def test_a_short_file_is_named(run: Path, trainer: Trainer) -> None:
    path = next(run.rglob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 8)

    with unchanged(trainer) as refused:
        trainer.resume(run)

    assert f"{path} has " in str(refused.value)


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(tmp_path: Path, trainer: Trainer) -> None:
    """The older format was a pickle. It is not read, and the error says what to do."""
    import pickle

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "hostile")))
    (folder / "piper.json").write_text(json.dumps({"version": 1, "steps": 3, "model": {}}))

    with unchanged(trainer) as refused:
        trainer.resume(folder)

    assert "was written by an older version of Piper" in str(refused.value)
    assert not (tmp_path / "hostile").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", ""])
def test_an_index_names_only_files_beside_it(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a file"):
        plain_name(name)


@pytest.mark.parametrize("change", [
    {"pieces": [[1]]}, {"pieces": 3}, {"files": [{"name": "x"}]}, {"steps": None},
    {"version": 9}, {"model": []}, {"processes": [[]]},
    {"pieces": [["first.bias", "parameter", "", -1, [0, 1, 1], "float64", [6], "x", 0, ""]]},
    {"pieces": [["first.bias", "parameter", "", 0, [0, 1, 1], "load", [6], "x", 0, ""]]},
])  # fmt: skip
def test_an_index_that_makes_no_sense_is_refused(
    change: dict[str, Any], run: Path, trainer: Trainer
) -> None:
    """Its digests may be right: whoever wrote it computed them."""
    path = next(run.rglob("index.json"))
    body = {**json.loads(path.read_text()), **change}
    body.pop("digest")
    path.write_bytes(sealed(body))
    pointer = json.loads((run / "piper.json").read_text())
    pointer.pop("digest")
    pointer["checkpoints"][0][2] = digest_of(path.read_bytes())
    (run / "piper.json").write_bytes(sealed(pointer))

    with unchanged(trainer) as refused:
        trainer.resume(run)

    assert f"{path} is not an index" in str(refused.value)


def test_what_the_user_has_beside_it_is_his(tmp_path: Path) -> None:
    trainer = alone()
    for name in ("run.old", "run.part", ".run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    for _ in range(2):
        trainer.save(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    trainer.save(tmp_path / "run")

    for name in ("run.old", "run.part", ".run"):
        assert (tmp_path / name / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    trainer.close()


@pytest.mark.parametrize("name", ["..", "notes", "../notes", "", 3, None, [], "step-1/../../notes"])
def test_a_lock_file_removes_nothing_of_the_user(name: object, run: Path, trainer: Trainer) -> None:
    (run.parent / "notes").mkdir()
    (run / "notes").mkdir()
    (run / "piper.lock").write_text(json.dumps({"folders": [name]}))

    trainer.save(run)

    assert (run / "notes").is_dir()
    assert (run.parent / "notes").is_dir()


def test_what_a_crash_left_behind_is_removed(run: Path, trainer: Trainer) -> None:
    (run / "step-7").mkdir()
    (run / "step-8").mkdir()  # of the user
    (run / "piper.lock").write_text(json.dumps({"folders": ["step-7"]}))

    trainer.save(run)

    left = sorted(path.name for path in run.iterdir() if path.is_dir())
    assert left == ["step-0", "step-1", "step-8"]  # step-1 is of a longer run


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    trainer = alone()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "a")  # which does not exist yet
    for batch in data()[:2]:
        trainer.step(*batch)
        trainer.save(tmp_path / "run")
    trainer.close()

    assert (tmp_path / "run").is_symlink()
    assert alone().resume(tmp_path / "run") == 2


# The format


def test_other_programs_read_the_files(run: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    path = next(run.rglob("*.safetensors"))

    found = library.load_file(path)

    header = read_header(path)
    assert found.keys() == header.entries.keys()
    assert all(found[name].dtype == one.dtype for name, one in header.entries.items())


def test_every_type_is_written_as_others_write_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    made = {
        str(dtype): torch.arange(6).remainder(2).to(dtype).view(2, 3) for dtype in NAMES
    } | {"empty": torch.empty(0, 3), "single": torch.tensor(2.5)}  # fmt: skip

    header, content = header_of({n: (t.dtype, tuple(t.shape)) for n, t in made.items()}, {"a": "b"})
    (tmp_path / "x").write_bytes(content + b"".join(bytes_of(made[n]) for n in header.entries))

    found = library.load_file(tmp_path / "x")
    assert read_header(tmp_path / "x") == header
    for name, tensor in made.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(found[name]) == bytes_of(tensor)


# Command line


def test_a_checkpoint_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(run, tensors=True, verify=True)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step-1: 1 step, saved 20")
    assert "  first.bias  float64 [6]" in lines
    assert lines[-1].startswith("verified: all ")


def test_what_is_damaged_is_not_verified(run: Path) -> None:
    flip(next(run.rglob("*.safetensors")), 9000)

    with pytest.raises(InputError, match="0.safetensors is damaged"):
        show(run, verify=True)
