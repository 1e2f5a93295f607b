"""An export replaces older weights in a folder, and loses neither if it fails."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Branches, alone, weights
from replicas import data
from torch.nn import functional

from piper import Trainer
from piper.errors import InputError
from piper.runtime.checkpoint.format import replaced_weights
from piper.runtime.checkpoint.format.replaced_weights import weights_in

safetensors = pytest.importorskip("safetensors.torch")
ONE, SEVERAL = 5.0, 1e-7  # GiB of a file


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """What an index names, or else the one file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return dict(safetensors.load_file(folder / "model.safetensors"))
    rows = json.loads(index.read_text())["weight_map"]
    return {name: safetensors.load_file(folder / file)[name] for name, file in rows.items()}


@pytest.fixture(scope="module")
def trainer() -> Any:
    made = alone()
    yield made
    made.close()


def test_new_weights_replace_old_ones_in_any_number_of_files(
    tmp_path: Path, trainer: Trainer
) -> None:
    (tmp_path / "model_card.safetensors").write_text("of the user")
    for size in (ONE, ONE, SEVERAL, SEVERAL, ONE):
        trainer.step(*data()[0])
        trainer.export(tmp_path, size)

        found, wanted = tensors_in(tmp_path), weights(trainer)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        there = set(weights_in(tmp_path, "model"))
        assert there == ({"model.safetensors"} if size == ONE else there)
        assert (len(there) == len(wanted) + 1) == (size == SEVERAL)
        assert {path.name for path in tmp_path.iterdir()} == there | {"model_card.safetensors"}


@pytest.mark.parametrize(("before", "after"), [(ONE, ONE), (ONE, SEVERAL), (SEVERAL, SEVERAL)])
def test_whatever_fails_leaves_the_old_weights(
    before: float, after: float, tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each renaming fails once, until one attempt has no more of them."""
    trainer.export(tmp_path, before)
    old = contents(tmp_path)
    trainer.step(*data()[0])
    real, failures = Path.replace, 0
    for last in count():
        calls = count()

        def replace(path: Path, target: Path, last: int = last, calls: Any = calls) -> Path:
            if next(calls) == last:
                raise OSError(28, "No space left on device")
            return real(path, target)

        monkeypatch.setattr(Path, "replace", replace)
        try:
            trainer.export(tmp_path, after)
        except InputError:
            failures += 1
            assert contents(tmp_path) == old
        else:
            break
    assert failures >= (1 if after == ONE else 2 * len(weights(trainer)) * (before == SEVERAL) + 2)
    assert all(torch.equal(tensors_in(tmp_path)[n], t) for n, t in weights(trainer).items())


def test_what_no_step_has_used_outlives_the_files_that_it_was_read_from(tmp_path: Path) -> None:
    """They are replaced by files in which it lies elsewhere."""
    x = torch.linspace(-1, 1, 48).double().reshape(8, 6)
    short, long = (x[:2], x[2:4]), (x, x.flip(0))
    model = Branches()
    wanted = {name: one + 1 for name, one in model.state_dict().items()}
    names = sorted(wanted, reverse=True)
    safetensors.save_file({name: wanted[name] for name in names}, tmp_path / "model.safetensors")
    trainer = Trainer(model, functional.mse_loss, example=short, device="cpu")
    trainer.load(tmp_path)
    trainer.step(*short)
    for size in (SEVERAL, ONE):
        trainer.export(tmp_path, size)
        found = tensors_in(tmp_path)
        assert torch.equal(found["long.weight"], wanted["long.weight"])
    loss = trainer.step(*long).loss
    trainer.close()

    output = functional.linear(x, wanted["long.weight"], wanted["long.bias"])
    assert loss == pytest.approx(functional.mse_loss(output, x.flip(0)).item(), rel=1e-12)


def test_only_weights_of_this_name_are_replaced(tmp_path: Path) -> None:
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "adapter_model.safetensors"]
    names += ["model.safetensors.index.json", "model-extra.safetensors", "modelXsafetensors"]
    for name in names:
        (tmp_path / name).touch()

    assert weights_in(tmp_path, "model") == sorted([names[0], names[1], names[3]])
    assert weights_in(tmp_path, "adapter_model") == [names[2]]
    assert replaced_weights.index_name("model") == names[3]
