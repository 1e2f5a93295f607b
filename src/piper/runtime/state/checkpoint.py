"""Checkpoints, from which a run continues under any strategy.

A checkpoint holds every tensor in pieces that do not depend on devices (tensor_pieces.py). A device
that holds a part of a tensor reads the pieces that overlap it. torch.distributed.checkpoint writes
and reads them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper.errors import InputError
from piper.runtime.comm.world import gather, world
from piper.runtime.state.device_state import DeviceState
from piper.runtime.state.optimizers import forward
from piper.runtime.state.tensor_pieces import (
    WHERE,
    Described,
    Reader,
    Tensors,
    quiet,
    refused,
    saved,
)

LOG = logging.getLogger("piper")
INDEX = "piper.json"
HOW = ("foreach", "fused", "capturable", "differentiable")  # options that change no result
Contents = tuple[set[str], set[str], set[tuple[str, str]]]  # of a process: names, kinds, options
VERSION = 1
SPACE = "choose a folder that all processes can read and write, with enough free space"


def described(model: torch.nn.Module) -> Described:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in named}


def save(
    folder: Path, state: DeviceState, owned: Collection[str], model: Described, steps: int
) -> None:
    """All processes call this. An older checkpoint stays until the new one is complete."""
    import torch.distributed.checkpoint as dcp

    folder = folder.absolute()
    part, pieces = folder.with_name(folder.name + ".part"), dict[str, torch.Tensor]()
    on_first(lambda: emptied(part, folder))
    everywhere(lambda: pieces.update(saved(state, owned)))
    everyone = gather((set(names_of(state)), optimizers_of(state), options_of(state)))
    pieces.update(carried(state, everyone))
    try:
        with quiet():
            dcp.save(dict(pieces), storage_writer=dcp.FileSystemWriter(part), no_dist=world() == 1)
    except dcp.CheckpointException as error:  # which torch raises on all processes
        reasons = sorted({str(reason) for reason, _ in error.failures.values()})
        raise refused("; ".join(reasons), SPACE) from None
    kinds = sorted({kind for _, kinds, _ in everyone or () for kind in kinds})
    options = sorted({option for _, _, options in everyone or () for option in options})
    about = {"steps": steps, "optimizers": kinds, "options": options, "model": model}
    on_first(lambda: finished(part, folder, about))
    if state.origin is not None:  # the older checkpoint may be gone
        state.origin = Reader(folder)


def names_of(state: DeviceState) -> list[str]:
    return [name for bucket in state.buckets.values() for name in bucket.names]


def optimizers_of(state: DeviceState) -> set[str]:
    return {type(optimizer).__name__ for optimizer in state.optimizers().values()}


def options_of(state: DeviceState) -> set[tuple[str, str]]:
    """The options that optimizers were made with, without later changes of their rates."""
    every = (optimizer.defaults for optimizer in state.optimizers().values())
    return {(n, repr(v)) for found in every for n, v in found.items() if n not in HOW}


def carried(state: DeviceState, everyone: list[Contents] | None) -> Tensors:
    """On the first process: parameters of an older checkpoint that no step has used since."""
    if everyone is None or state.origin is None:
        return {}
    return state.origin.rest(set().union(*(names for names, _, _ in everyone)))


def emptied(part: Path, folder: Path) -> None:
    if folder.exists() and not (folder / INDEX).is_file():
        raise refused(
            f"{folder} exists and is not a checkpoint", "choose a folder that does not exist yet"
        )
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def finished(part: Path, folder: Path, about: Mapping[str, Any]) -> None:
    (part / INDEX).write_text(json.dumps({"version": VERSION, **about}) + "\n")
    old = older(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def older(folder: Path) -> Path:
    """Where the older checkpoint is while the new one takes its place."""
    return folder.with_name(folder.name + ".old")


def restore_older(folder: Path) -> None:
    """Undo the rename if a crash came between the two renames."""
    if not folder.exists() and (older(folder) / INDEX).is_file():
        older(folder).rename(folder)


def resume(folder: Path, state: DeviceState, model: Described, steps: int, missing_ok: bool) -> int:
    """Fill all tensors of this device, and step the schedulers to where they were."""
    if steps:
        raise refused("this Trainer has already run steps", "resume with a new Trainer")
    folder, done = folder.absolute(), list[int]()
    on_first(lambda: restore_older(folder))
    everywhere(lambda: done.append(-1 if missing_ok and not folder.exists() else 0))
    if done[0] < 0:
        return 0
    everywhere(lambda: done.append(filled(folder, state, model)))
    return done[-1]


def filled(folder: Path, state: DeviceState, model: Described) -> int:
    found = about(folder)
    refuse_unlike(folder, found["model"], model)
    others = optimizers_of(state) - set(found["optimizers"])
    if found["steps"] and others:
        was = " and ".join(found["optimizers"])
        raise refused(f"{folder} was saved with {was}, not with {', '.join(others)}", f"use {was}")
    warn_of_changed_options(state, {tuple(option) for option in found.get("options", ())})
    reader, steps = Reader(folder), int(found["steps"])
    for bucket in state.buckets.values():
        reader.fill(bucket)
        if bucket.scheduler is not None:
            forward(bucket.scheduler, steps)
    state.origin = reader
    return steps


def warn_of_changed_options(state: DeviceState, there: set[tuple[str, str]]) -> None:
    """A changed rate or momentum may be intended, so it is a warning, not an error."""
    if dist.is_initialized() and dist.get_rank():
        return  # the first process warns
    here = options_of(state)
    for name in sorted({name for name, _ in here - there} & {name for name, _ in there}):
        was, now = (", ".join(sorted(v for n, v in of if n == name)) for of in (there, here))
        LOG.warning("the optimizer's %s was %s when this was saved, and is %s now", name, was, now)


def about(folder: Path) -> dict[str, Any]:
    """What the checkpoint says about itself."""
    path = folder / INDEX
    if not path.is_file():
        raise refused(f"{folder} is not a checkpoint", WHERE)
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("version") != VERSION:
        raise refused(f"{folder} was written by another version of Piper", "use that version")
    return found


def refuse_unlike(folder: Path, there: Described, here: Described) -> None:
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            what = f"{name} is {tensor_text(there.get(name))} there, {tensor_text(here.get(name))}"
            raise refused(
                f"{folder} belongs to another model: {what} here", "build the model that was saved"
            )


def tensor_text(described: list[Any] | None) -> str:
    if described is None:
        return "nothing"
    shape, dtype = described
    return f"{dtype.removeprefix('torch.')} {shape}"


def on_first(act: Callable[[], None]) -> None:
    """Run it on the first process. If it fails there, it fails on all."""
    everywhere(act if not dist.is_initialized() or dist.get_rank() == 0 else lambda: None)


def everywhere(act: Callable[[], None]) -> None:
    """Run it on all processes. If it fails on one, it fails on all, so that none waits."""
    error: Exception | None = None
    try:
        act()
    except (OSError, InputError) as found:
        error = found if isinstance(found, InputError) else refused(str(found), SPACE)
    reasons: list[str] = [str(error or "")] * world()
    if world() > 1:
        dist.all_gather_object(reasons, str(error or ""))
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason:
            raise refused(f"it failed on process {rank}", f"there: {reason}")
