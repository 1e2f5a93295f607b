"""Batches of given shapes, without the values of the user: what programs are compiled for."""

from __future__ import annotations

from dataclasses import replace

import torch

from piper.job.batch.batch import Batch, Shapes
from piper.job.processes.different_lengths import alike
from piper.runtime.processes.gathering import everyone


def as_in_first(example: Batch) -> Batch:
    """The form of the first process's example, without values. All processes have it in common."""
    shapes = everyone(example.shapes, "the comparison of examples")[0]
    if alike(shapes) != alike(example.shapes):
        shapes = example.shapes  # it is refused when models and options are compared
    return in_shapes(example, shapes, "meta")


def in_shapes(batch: Batch, shapes: Shapes, device: str) -> Batch:
    """Zeros in these shapes: what programs are compiled for."""
    leaves = (
        torch.zeros(shape[0], dtype=shape[1], device=device) if isinstance(shape, tuple) else leaf
        for leaf, shape in zip(batch.leaves, shapes, strict=False)
    )
    return replace(batch, leaves=tuple(leaves))
