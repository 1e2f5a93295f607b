"""What a checkpoint is of: the tensors of the model, the optimizers, and their options."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.index import Described, Index
from piper.runtime.processes.wire_format import travels
from piper.runtime.state.device_state import DeviceState

LOG = logging.getLogger("piper")
HOW = ("foreach", "fused", "capturable", "differentiable")  # options that change no result


@travels
class Contents(NamedTuple):
    """What a process holds: kinds of optimizers, and the options that they were made with."""

    optimizers: set[str]
    options: set[tuple[str, str]]


def described(model: torch.nn.Module) -> Described:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in named}


def names_of(state: DeviceState) -> set[str]:
    return {name for bucket in state.buckets.values() for name in bucket.names}


def contents_of(state: DeviceState) -> Contents:
    """Options are as optimizers were made, without later changes of their rates."""
    made = state.optimizers().values()
    options = {
        (n, repr(v)) for one in made for n, v in one.defaults.items() if n not in HOW
    }  # fmt: skip
    return Contents({type(one).__name__ for one in made}, options)


def refuse_unlike(folder: Path, index: Index, state: DeviceState, model: Described) -> None:
    """The model and the optimizers must be those that were saved."""
    for name in sorted({*index.model, *model}):
        there, here = index.model.get(name), model.get(name)
        if there != here:
            what = f"{name} is {there_text(there)}; the model has {tensor_text(here)}"
            raise refused(
                f"{folder} belongs to another model: {what}", "build the model that was saved"
            )
    others = contents_of(state).optimizers - set(index.optimizers)
    if index.steps and others:
        was = " and ".join(index.optimizers)
        raise refused(f"{folder} was saved with {was}, not with {', '.join(others)}", f"use {was}")


def there_text(described: list[Any] | None) -> str:
    if described is None:
        return "missing from the checkpoint"
    return f"{tensor_text(described)} in the checkpoint"


def tensor_text(described: list[Any] | None) -> str:
    if described is None:
        return "no such tensor"
    shape, dtype = described
    return f"{dtype.removeprefix('torch.')} {shape}"


def warn_of_changed_options(index: Index, state: DeviceState) -> None:
    """A changed rate or momentum may be intended, so it is a warning, not an error."""
    here, there = contents_of(state).options, set(index.options)
    for name in sorted({name for name, _ in here - there} & {name for name, _ in there}):
        was, now = (", ".join(sorted(v for n, v in of if n == name)) for of in (there, here))
        LOG.warning("the optimizer's %s was %s when this was saved, and is %s now", name, was, now)
