"""The checkpoints of one Trainer: at most one is being written, beside the steps that follow."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from piper.runtime.checkpoint.description import described, names_of
from piper.runtime.checkpoint.export import export
from piper.runtime.checkpoint.folder import Keep
from piper.runtime.checkpoint.format.problems import refuse_file, refused, resolved
from piper.runtime.checkpoint.layout import Arrange, Written
from piper.runtime.checkpoint.load import load
from piper.runtime.checkpoint.lock import FolderLock
from piper.runtime.checkpoint.model_names import ModelTensor, refuse_no_function
from piper.runtime.checkpoint.peers import Peers, peers
from piper.runtime.checkpoint.pieces import Turns
from piper.runtime.checkpoint.process_values import process_values, refuse_other_loader
from piper.runtime.checkpoint.reader import Reader
from piper.runtime.checkpoint.resume import resume
from piper.runtime.checkpoint.save import Run, opened, snapshot, write
from piper.runtime.checkpoint.unused import Initial, unsaved, unused
from piper.runtime.checkpoint.weights import Rename
from piper.runtime.processes.world import closed_at_exit
from piper.runtime.state.constants import refuse_other_values
from piper.runtime.state.device_state import DeviceState

LOG = logging.getLogger("piper")

FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".pkl", ".h5", ".onnx", ".json")


@dataclass(eq=False)
class Checkpoints:
    """Saves and resumes. All processes make the same calls."""

    made: list[Peers] = field(default_factory=list)  # once they are needed
    locks: dict[Path, FolderLock] = field(default_factory=dict)  # of this run, on the first process
    thread: threading.Thread | None = None  # that writes a checkpoint
    errors: list[BaseException] = field(default_factory=list)  # of that thread
    own: set[Path] = field(default_factory=set)  # folders that this run has saved or resumed

    def __post_init__(self) -> None:
        weakref.finalize(self, release, self.locks)

    @property
    def peers(self) -> Peers:
        """A checkpoint that is being written uses them, too, so it must be complete first."""
        self.finish()
        if not self.made:
            self.made.append(peers())
            closed_at_exit(self)
        return self.made[0]

    def save(
        self, folder: Any, run: Run, state: DeviceState, turns: Turns, keep: Keep,
        loader: Any, wait: bool, model: nn.Module, initial: Initial,
    ) -> None:  # fmt: skip
        """An older checkpoint stays until the new one is complete."""
        self.finish()
        refuse_other_loader(loader)
        place = resolved(folder_of(folder, "save"))
        asked = {"folder": str(place), "keep": keep.newest, "keep_every": keep.every, "wait": wait}
        everyone = self.peers
        refuse_other_calls(everyone.everyone(asked))
        used = set[str]().union(*everyone.everyone(names_of(state)))
        rest = unused(state.origin, used, model)
        values = everyone.each(partial(process_values, loader, state.device))
        values |= state.loss_scale.saved if state.loss_scale else {}
        first = partial(rest.pieces, initial)
        given = snapshot(everyone, run, state, turns, values, first, copy=not wait)
        part = opened(everyone, place, run.steps, self.locks)
        keep = replace(keep, own=place in self.own)
        self.own.add(place)
        writing = partial(write, everyone, part, self.locks.get(part.parent), given, keep)
        if wait or rest.there:
            writing()
            state.origin = Reader(part) if rest.there else None  # the older one may be gone
        else:
            state.origin = None
            self.thread = threading.Thread(target=self.attempt, args=(writing,))
            atexit.register(self.finish)  # the script may end before
            self.thread.start()

    def attempt(self, writing: Callable[[], None]) -> None:
        try:
            writing()
        except BaseException as error:
            self.errors.append(error)

    def resume(
        self, folder: Any, run: Run, state: DeviceState, missing_ok: bool, loader: Any,
        model: nn.Module,
    ) -> int:  # fmt: skip
        self.finish()
        refuse_other_loader(loader)
        place = resolved(path_of(folder))
        steps = resume(self.peers, place, state, run, missing_ok, loader)
        self.own.update((place, place.parent))  # the run, or one of its checkpoints
        state.kept.look(state.optimizers().values())
        self.peers.each(partial(refuse_other_values, state))
        if state.origin is not None and self.peers.rank == 0:
            for line in unsaved(state.origin, model):
                LOG.warning("%s", line)
        return steps

    def load(
        self, path: Any, run: Run, state: DeviceState, tensors: Sequence[ModelTensor],
        model: nn.Module, rename: Rename | None, strict: bool, arrange: Arrange | None = None,
    ) -> None:  # fmt: skip
        self.finish()
        refuse_no_function("rename", rename)
        if run.steps:
            raise refused("this Trainer has already run steps", "load before the first step")
        own = described(model)
        load(self.peers, resolved(path_of(path)), state, tensors, own, rename, strict, arrange)
        state.kept.look(state.optimizers().values())
        self.peers.each(partial(refuse_other_values, state))

    def export(
        self, folder: Any, state: DeviceState, turns: Turns, tensors: list[ModelTensor],
        initial: Initial, max_file_gib: float, rename: Rename, file: str,
        written: Written | None = None, call: str = "export",
    ) -> None:  # fmt: skip
        self.finish()
        refuse_no_function("rename", rename)
        if not isinstance(max_file_gib, int | float) or not 0 < max_file_gib < float("inf"):
            what = f"max_file_gib={max_file_gib!r} is not a size"
            raise refused(what, "write how many GiB a file may have: max_file_gib=5")
        given = state, turns, tensors, initial, int(max_file_gib * 2**30)
        place = resolved(folder_of(folder, call))
        self.peers.each(partial(refuse_file, place, call))
        export(self.peers, place, *given, rename, file, written)

    @property
    def failed(self) -> bool:
        """Whether the checkpoint that was being written is lost."""
        return bool(self.errors)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. An error of it is raised here."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            atexit.unregister(self.finish)
        if self.errors:
            raise self.errors.pop()

    def close(self) -> None:
        try:
            self.finish()
        finally:
            release(self.locks)
            self.made.clear()

    def refuse_failed(self, anywhere: bool) -> None:
        """All processes raise in the same call, if a checkpoint of one of them is lost."""
        if anywhere:
            self.finish()
            raise refused("the last one is lost: see the other processes", "save again")


def refuse_other_calls(asked: Sequence[Mapping[str, object]]) -> None:
    """Processes that do not save in the same way: what the first says would count."""
    for rank, (name, value) in ((k, one) for k, each in enumerate(asked) for one in each.items()):
        if value != asked[0][name]:
            raise refused(
                f"device {rank} saves with {name}={value!r}, device 0 with {asked[0][name]!r}",
                "let all processes make the same call",
            )


def path_of(given: Any) -> Path:
    if isinstance(given, str | os.PathLike):
        return Path(given)
    kind = type(given).__name__
    fix = "give a path; or model.load_state_dict(weights), before you make the Trainer"
    raise refused(f"it was given a value of type {kind}, and not a path", fix)


def folder_of(given: Any, call: str) -> Path:
    """Where to write. A name of a file would become that of a folder."""
    found = path_of(given)
    if found.suffix in FILES and not found.is_dir():
        what = f"{given} is the name of a file, and {call} writes a folder"
        raise refused(what, f'write trainer.{call}("{found.with_suffix("")}")')
    return found


def release(locks: dict[Path, FolderLock]) -> None:
    while locks:
        locks.popitem()[1].release()
