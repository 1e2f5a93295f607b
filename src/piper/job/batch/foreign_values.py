"""What a batch holds that is neither a tensor nor a constant, such as arrays of numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from piper.capture.trace.arguments.inputs import CONSTANTS
from piper.errors import InputError
from piper.job.batch.batch import Batch
from piper.job.batch.input_names import named_arguments

ALLOWED = (torch.Tensor, *CONSTANTS)


def refuse_foreign_values(model: torch.nn.Module, loss_fn: Any, batch: Batch, where: str) -> None:
    for name, one in foreign_values(model, loss_fn, batch):
        kind, home = type(one).__qualname__, type(one).__module__
        what = f"{name} is of type {kind}" if home == "builtins" else f"{name} is a {home}.{kind}"
        if hasattr(one, "__array__"):
            raise InputError.of(where, what, "give tensors: torch.as_tensor(...)")
        fix = "give tensors, numbers, strings, and lists, tuples or dicts of these"
        raise InputError.of(where, what, fix)


def foreign_values(model: torch.nn.Module, loss_fn: Any, batch: Batch) -> Iterator[tuple[str, Any]]:
    """With the names of the arguments in which they are."""
    if all(isinstance(leaf, ALLOWED) for leaf in batch.leaves):
        return
    for name, one in named_arguments(model, loss_fn, batch):
        found = [leaf for leaf in Batch.of((one,)).leaves if not isinstance(leaf, ALLOWED)]
        inside = name if found and found[0] is one else f"an entry of {name}"
        yield from ((inside, leaf) for leaf in found)
