"""Tensors of a model that are others in files: cut into rows, say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import alone, weights

from piper.runtime.checkpoint.layout import Layout, Segment, Shapes, Stored, Written, as_they_are
from piper.runtime.checkpoint.model_names import model_tensors

safetensors = pytest.importorskip("safetensors.torch")
NAME = "first.weight"


def in_rows(shapes: Shapes, rows: int) -> Layout:
    """All tensors as they are, but one is there in rows."""
    size = shapes[f"{NAME}.0"][0]
    cut = tuple(Segment(k * size, size, f"{NAME}.{k}", 0) for k in range(rows))
    others = {name: shape for name, shape in shapes.items() if not name.startswith(NAME)}
    return {**as_they_are(others), NAME: Stored((rows, size), cut)}


def test_a_tensor_is_written_and_read_in_rows(tmp_path: Path) -> None:
    one, other = alone(), alone(seed=4)
    wanted, tensors = weights(one), model_tensors(one._job.model)
    rows, size = wanted[NAME].shape
    own = {each.name: each.shape for each in tensors}
    shapes = {n: s for n, s in own.items() if n != NAME}
    shapes |= {f"{NAME}.{k}": (size,) for k in range(rows)}
    written = Written(shapes, in_rows(shapes, rows))
    assert written.is_complete(own)
    given = one._programs.state, one._programs.turns, tensors, one._job.initial, 1e-7, str
    one._checkpoints.export(tmp_path, *given, "model", written)

    model = other._job.model
    target = other._run, other._programs.state, model_tensors(model), model, None, True
    other._checkpoints.load(tmp_path, *target, lambda there: in_rows(there, rows))

    files = list(tmp_path.glob("*.safetensors"))
    there = {k: v for file in files for k, v in safetensors.load_file(file).items()}
    assert len(files) > 1 and there.keys() == shapes.keys()
    assert all(torch.equal(there[f"{NAME}.{k}"], wanted[NAME][k]) for k in range(rows))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(other).items())
    one.close()
    other.close()


def test_what_is_not_written_once_is_seen() -> None:
    shapes = {"first.weight.0": (3,), "first.weight.1": (3,)}
    half = Stored((2, 3), (Segment(0, 3, "first.weight.0", 0),))
    twice = Stored((2, 3), (Segment(0, 3, "first.weight.0", 0), Segment(3, 3, "first.weight.0", 0)))

    assert Written(shapes, in_rows(shapes, 2)).is_complete({NAME: (2, 3)})
    assert not Written(shapes, in_rows(shapes, 2)).is_complete({NAME: (3, 2)})
    assert not Written(shapes, {NAME: half}).is_complete({NAME: (2, 3)})
    assert not Written(shapes, {NAME: twice}).is_complete({NAME: (2, 3)})
