"""Resuming: all processes read what they need; if that fails on one of them, nothing is changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from piper.runtime.checkpoint.description import refuse_unlike, warn_of_changed_options
from piper.runtime.checkpoint.folder import (
    POINTER,
    current,
    is_checkpoint,
    kept_in,
    refuse_foreign,
    refuse_lost_pointer,
)
from piper.runtime.checkpoint.format.files import digest_of
from piper.runtime.checkpoint.format.plain_values import decoded
from piper.runtime.checkpoint.format.problems import WHERE, damaged, refuse_file, refused
from piper.runtime.checkpoint.format.sealed_json import unsealed
from piper.runtime.checkpoint.format.strict_values import WRONG, count
from piper.runtime.checkpoint.index import INDEX, Index, ProcessFile
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.process_values import (
    Loader,
    RandomState,
    refuse_other_state,
    restore_random_state,
)
from piper.runtime.checkpoint.reader import Reader, States, put
from piper.runtime.checkpoint.save import Run
from piper.runtime.optimizers.missing_state import missing_state
from piper.runtime.optimizers.user_optimizer import forward
from piper.runtime.state.device_state import BucketState, DeviceState

LOG = logging.getLogger("piper")


@dataclass(frozen=True)
class Found:
    """What a process has read, before anything is changed."""

    reader: Reader
    buckets: list[tuple[BucketState, list[States]]]
    random: RandomState | None  # None: of another number of processes
    loader: Any
    loss_scale: tuple[float, int] | None  # None: the run had none


def resume(
    peers: Peers, folder: Path, state: DeviceState, run: Run, missing_ok: bool,
    loader: Loader | None,
) -> int:  # fmt: skip
    """Fill all tensors of this device, and step the schedulers to where they were."""
    if run.steps:
        raise refused("this Trainer has already run steps", "resume with a new Trainer")
    if not is_there(peers, folder, missing_ok):
        LOG.info("no checkpoint in %s yet: starting at step 0", folder)
        return 0
    found = peers.each(lambda: read(peers, folder, state, run, loader is not None))
    for bucket, states in found.buckets:
        put(bucket, states)
        if bucket.scheduler is not None:
            forward(bucket.scheduler, found.reader.index.steps)
    state.origin = found.reader
    state.reads += 1
    if state.loss_scale is not None and found.loss_scale is not None:
        state.loss_scale.restore(found.loss_scale)
    if loader is not None:
        loader.load_state_dict(found.loader)
    if found.random is not None:
        restore_random_state(found.random, state.device)
    LOG.info("resumed from %s at step %d", folder, found.reader.index.steps)
    return found.reader.index.steps


def is_there(peers: Peers, folder: Path, missing_ok: bool) -> bool:
    """Whether there is a checkpoint. All processes must see the same one, or none."""
    views = peers.everyone(peers.each(lambda: view(folder)))
    if not any(views) and missing_ok:
        peers.each(lambda: refuse_foreign(folder))  # else the first save would
        peers.each(lambda: refuse_lost_pointer(folder))
        return False
    for rank, seen in enumerate(views):
        if seen != views[0]:
            there = "another checkpoint" if seen and views[0] else "none" if views[0] else "one"
            raise refused(
                f"{folder} is not the same for all processes: device {rank} finds {there}",
                "give a folder that all hosts share",
            )
    if not any(views):
        peers.each(lambda: refuse_file(folder))
        fix = f"{WHERE}; to begin where there is none yet, write missing_ok=True"
        raise refused(f"{folder} is not a checkpoint", fix)
    return True


def view(folder: Path) -> str:
    """What a process sees in a folder."""
    if not is_checkpoint(folder):
        return ""
    path = folder / INDEX if (folder / INDEX).is_file() else folder / POINTER
    return digest_of(path.read_bytes())


def read(peers: Peers, folder: Path, state: DeviceState, run: Run, with_loader: bool) -> Found:
    reader = reader_of(folder)
    refuse_unlike(folder, reader.index, state, run.model)
    if peers.rank == 0:
        warn_of_changed_options(reader.index, state)
        for file in reader.index.files:
            reader.check_size(file)
    buckets = [(bucket, reader.states_of(bucket)) for bucket in state.buckets.values()]
    for bucket, states in buckets:
        refuse_missing_state(folder, bucket, states)
    random = random_of(reader, own_process(reader.index, peers), state.device)
    loader = decoded_in(reader.folder, position(reader, run)) if with_loader else None
    return Found(reader, buckets, random, loader, loss_scale_of(reader))


def refuse_missing_state(folder: Path, bucket: BucketState, states: Sequence[States]) -> None:
    """An option that the optimizer did not have when it was saved may need more than there is."""
    if bucket.optimizer is None:
        return
    groups = {id(p): group for group in bucket.optimizer.param_groups for p in group["params"]}
    kinds = {
        (id(group), tuple(filter(None, held)), part.parameter.dim()): group
        for part, held in zip(bucket.parts(), states, strict=True)
        if (group := groups.get(id(part.parameter))) is not None
    }
    for (_, names, dims), group in kinds.items():
        missing = missing_state(bucket.optimizer, group, names, dims)
        if missing:
            kind = type(bucket.optimizer).__name__
            raise refused(
                f"{folder} has no {', '.join(missing)}, which {kind} keeps with its options of now",
                "give the optimizer the options with which this was saved, or begin its state anew "
                f"with the weights alone: trainer.load({str(folder)!r})",
            )


def reader_of(folder: Path, only_weights: bool = False) -> Reader:
    """The current checkpoint of a folder. Its index must be the one that was saved."""
    part = current(folder)
    for one in kept_in(folder):
        if part.name == one.folder and part != folder:
            path = part / INDEX
            if not path.is_file():
                raise damaged(path, "is missing")
            if digest_of(path.read_bytes()) != one.digest:
                raise damaged(path, "is damaged, or of another checkpoint")
    return Reader(part, only_weights=only_weights)


def own_process(index: Index, peers: Peers) -> ProcessFile | None:
    """Of this process, if there were as many of them."""
    if len(index.processes) != peers.count:
        return None
    return next((one for one in index.processes if one.rank == peers.rank), None)


def values_of(reader: Reader, process: ProcessFile | None) -> dict[str, Any]:
    if process is None:
        return {}
    path = reader.folder / process.name
    if not path.is_file():
        raise damaged(path, "is missing")
    content = path.read_bytes()
    if digest_of(content) != process.digest:
        raise damaged(path, "is damaged, or of another checkpoint")
    return unsealed(path, content)


def decoded_in(path: Path, value: Any) -> Any:
    try:
        return decoded(value)
    except WRONG as error:
        what = f"has values that Piper does not write ({str(error)[:80]})"
        raise damaged(path, what) from None


def random_of(
    reader: Reader, process: ProcessFile | None, device: torch.device
) -> RandomState | None:
    """The random state of a process, if it can be restored."""
    value = values_of(reader, process).get("random")
    if process is None or value is None:
        return None
    path = reader.folder / process.name
    found = decoded_in(path, value)
    try:
        refuse_other_state(found, device)
    except WRONG as error:
        raise damaged(path, f"has no random state ({str(error)[:80]})") from None
    return found


def loss_scale_of(reader: Reader) -> tuple[float, int] | None:
    """The loss scale, and for how many steps it was right."""
    process = next(iter(reader.index.processes), None)
    found = values_of(reader, process).get("loss_scale")
    if process is None or found is None:
        return None
    try:
        scale, good = float(found[0]), count(found[1])
    except WRONG:
        scale, good = 0.0, 0
    if not (isfinite(scale) and scale > 0.0):
        raise damaged(reader.folder / process.name, "has no loss scale")
    return scale, good


def position(reader: Reader, run: Run) -> Any:
    """Where the loader of this replica was."""
    index = reader.index
    same = index.replicas == run.replicas
    whose = [one for one in index.processes if one.replica == run.replica or not same]
    found = [values_of(reader, one) for one in whose]
    if not found or "loader" not in found[0]:
        raise refused(
            f"{reader.folder} has no position of a loader",
            "save with loader=..., or leave it out and skip as many batches as steps are done",
        )
    if any(one["loader"] != found[0]["loader"] for one in found):
        raise refused(
            f"{reader.folder} was saved with the data in {index.replicas} parts, and now there "
            f"are {run.replicas}: the positions of the loaders do not fit",
            "leave out loader=, and skip as many batches as steps are done",
        )
    return found[0]["loader"]
