"""Checkpoints that somebody wrote with care: whatever they say is told, and changes nothing.

Digests are no seal of their writer: each attack computes them anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import alone
from draws import drawn, draws, one_of
from hostile import DEEP, VALUES, changed, places
from replicas import data

from piper import Trainer
from piper.errors import InputError
from piper.runtime.checkpoint.format.files import digest_of
from piper.runtime.checkpoint.format.safetensors_format import LENGTH
from piper.runtime.checkpoint.format.sealed_json import HEAD, TAIL, sealed
from piper.runtime.checkpoint.summary import summary, tensor_lines, verified

MARK = 7.0  # in all parameters, before each attack


class Loader:
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": (1, torch.ones(2)), "seen": [b"a", {"b": None}]}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Whatever it is."""


@dataclass(frozen=True)
class Saved:
    """A run, and a Trainer that is to resume it."""

    run: Path
    trainer: Trainer

    def document(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path(kind).read_bytes())
        del found["digest"]
        return found

    def path(self, kind: str) -> Path:
        names = {"pointer": "piper.json", "index": "step-1/index.json", "process": "step-1/0.json"}
        return self.run / names[kind]

    def put(self, kind: str, content: bytes) -> None:
        """Write a file, and its digest wherever that is known."""
        self.path(kind).write_bytes(content)
        if kind == "process":
            index = self.document("index")
            index["processes"][0]["digest"] = digest_of(content)
            self.put("index", sealed(index))
        if kind == "index":
            pointer = self.document("pointer")
            pointer["checkpoints"][-1][2] = digest_of(content)
            self.put("pointer", sealed(pointer))

    def is_told(self) -> bool:
        """Whether resuming is an error. It may work as well, but must not do half of it."""
        buckets = self.trainer._programs.state.buckets.values()
        parameters = [parameter.data for one in buckets for parameter in one.parameters]
        for one in parameters:
            one.fill_(MARK)
        before, self.trainer.steps = torch.get_rng_state(), 0
        try:
            self.trainer.resume(self.run, loader=Loader())
        except InputError:
            assert all(bool((one == MARK).all()) for one in parameters)
            assert torch.equal(torch.get_rng_state(), before)
            return True
        finally:
            self.trainer.steps = 0
        return False

    def is_shown_or_told(self) -> None:
        for read in (summary, tensor_lines, lambda run: [verified(run)]):
            try:
                list(read(self.run))
            except InputError:
                continue


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    made, run = alone(), tmp_path_factory.mktemp("hostile") / "run"
    made.step(*data()[0])
    made.save(run, loader=Loader())
    made.close()
    trainer = alone()
    yield Saved(run, trainer)
    trainer.close()


@pytest.fixture
def saved(original: Saved, tmp_path: Path) -> Saved:
    return Saved(Path(shutil.copytree(original.run, tmp_path / "run")), original.trainer)


@one_of(2)
@drawn
@pytest.mark.parametrize("kind", ["pointer", "index", "process"])
def test_any_value_may_be_anything(kind: str, saved: Saved) -> None:
    draw, document = random.Random(len(kind)), saved.document(kind)
    whole = {one: saved.path(one).read_bytes() for one in ("process", "index", "pointer")}
    cases = [(at, to) for at in places(document) for to in VALUES]
    several = [(at, to) for at, to in cases if len(at) <= 3 and "random" not in at]
    told = 0

    for at, to in draw.choices(several, k=draws(24, 2000)) + draw.choices(cases, k=draws(10, 500)):
        saved.put(kind, sealed(changed(document, at, to)))
        told += saved.is_told()
        saved.is_shown_or_told()
        for one, content in whole.items():
            saved.path(one).write_bytes(content)

    assert told > 15
    assert not saved.is_told()


@pytest.mark.parametrize("kind", ["pointer", "index", "process"])
@pytest.mark.parametrize("text", [DEEP, "", "1}", '"a": ', '"a": ' + "9" * 5000 + "}", '"\xff"}'])
def test_what_is_no_json_is_told(kind: str, text: str, saved: Saved) -> None:
    content = ("{" + text).encode("latin-1")

    saved.put(kind, HEAD + digest_of(content).encode() + TAIL + content[1:])

    assert saved.is_told()
    saved.is_shown_or_told()


def test_a_lock_that_is_a_link_is_not_written_to(saved: Saved, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    diary.write_text("dear diary")
    (saved.run / "piper.lock").unlink()
    (saved.run / "piper.lock").symlink_to(diary)
    made = alone()
    made.step(*data()[0])

    with pytest.raises(InputError, match="piper.lock is a link"):
        made.save(saved.run)

    assert diary.read_text() == "dear diary"
    made.close()


@pytest.mark.parametrize("name", ["piper.json", "step-1/index.json", "step-1/0.json",
                                  "step-1/0.safetensors"])  # fmt: skip
def test_a_pipe_or_folder_in_place_of_a_file_is_told(name: str, saved: Saved) -> None:
    path = saved.run / name
    for make in (os.mkfifo, os.mkdir):
        path.unlink() if path.is_file() else None
        make(path)
        assert saved.is_told()
        saved.is_shown_or_told()
        path.rmdir() if path.is_dir() else path.unlink()


def weights_with(text: bytes, path: Path) -> Path:
    path.write_bytes(len(text).to_bytes(LENGTH, "little") + text + bytes(64))
    return path


@drawn
def test_headers_of_weights_may_be_anything(saved: Saved, tmp_path: Path) -> None:
    draw = random.Random(1)
    document = {"first.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                "__metadata__": {"format": "pt"}}  # fmt: skip
    cases = [(at, to) for at in places(document) for to in VALUES]

    for at, to in draw.choices(cases, k=draws(30, 1000)):
        text = json.dumps(changed(document, at, to)).encode()
        with pytest.raises(InputError):
            saved.trainer.load(weights_with(text, tmp_path / "a.safetensors"))
    for text in (DEEP.encode(), b"{}" + b"x" * 9, b"[1]", b"null", b'{"a": ' + b"9" * 5000 + b"}"):
        with pytest.raises(InputError):
            saved.trainer.load(weights_with(text, tmp_path / "a.safetensors"))


@pytest.mark.parametrize("text", [DEEP, "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}',
                                  '{"weight_map": {"a": "../b"}}', "\0"])  # fmt: skip
def test_a_map_of_weights_may_be_anything(text: str, saved: Saved, tmp_path: Path) -> None:
    weights_with(b"{}", tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)

    with pytest.raises(InputError):
        saved.trainer.load(tmp_path)


def test_an_error_of_a_loader_is_the_users() -> None:
    class Broken(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise LookupError("no position")

    made = alone()
    with pytest.raises(LookupError, match="no position"):
        made.save("never", loader=Broken())
    made.close()
