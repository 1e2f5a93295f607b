"""A run on disk: every tensor in pieces, by its name and by where in it a piece begins.

No piece knows of devices, so a run goes on under another strategy: whoever holds a part of a tensor
reads the pieces that it lies in. torch.distributed.checkpoint writes and reads them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper.errors import InputError, Problem
from piper.runtime.measure import settle
from piper.runtime.shards import forward
from piper.runtime.state import BucketState, DeviceState
from piper.runtime.world import world

PARAMETER, WHOLE, NUMBER = "parameter", "tensor", "number"  # what a piece is of
STEP = "step"  # torch's optimizers call their counts so; a parameter of one number is as large
INDEX = "piper.json"
VERSION = 1
ROOM = "give a folder that can be written and read by all processes, with room for it"
Tensors = dict[str, torch.Tensor]


def key_of(kind: str, state: str, name: str, first: int) -> str:
    """
    >>> key_of("parameter", "", "head.weight", 12)
    'parameter||head.weight|12'
    """
    return f"{kind}|{state}|{name}|{first}"


def saved(state: DeviceState, spoken: Collection[str]) -> Tensors:
    """What this device says of its parameters and buffers, and of their optimizers."""
    settle(state.device)
    found: Tensors = {}
    for value, bucket in state.buckets.items():
        if value in spoken:
            for name, first, _, parameter in bucket.parts():
                flat = parameter.data.flatten().cpu()
                found[key_of(PARAMETER, "", name, first)] = flat
                found.update(optimizer_pieces(bucket, name, first, parameter))
    return found


def optimizer_pieces(
    bucket: BucketState, name: str, first: int, parameter: torch.nn.Parameter
) -> Iterator[tuple[str, torch.Tensor]]:
    """A state that lies like its parameter is cut like it; others (a count of steps) are whole."""
    held = bucket.optimizer.state.get(parameter, {}) if bucket.optimizer is not None else {}
    for state, value in held.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and state != STEP:
            yield key_of(PARAMETER, state, name, first), value.detach().flatten().cpu()
        elif isinstance(value, torch.Tensor):
            yield key_of(WHOLE, state, name, 0), value.detach().cpu()
        elif isinstance(value, bool | int | float):
            yield key_of(NUMBER, state, name, 0), torch.tensor(value)
        elif value is not None:
            raise refused(
                f"the optimizer's {state!r} of {name} is a {type(value).__name__}",
                "let optimizers keep tensors and numbers only",
            )


def save(
    folder: Path, state: DeviceState, spoken: Collection[str], names: Iterable[str], steps: int
) -> None:
    """All processes together; what was there before stays until everything is written.

    `names` are all of the model's, for parameters that no step has used yet are in no piece.
    """
    import torch.distributed.checkpoint as dcp

    part = folder.with_name(folder.name + ".part")
    on_first(lambda: emptied(part, folder))
    pieces = saved(state, spoken)
    try:
        with quiet():
            dcp.save(dict(pieces), storage_writer=dcp.FileSystemWriter(part), no_dist=world() == 1)
    except dcp.CheckpointException as error:  # which torch raises on all processes
        reasons = {str(reason) for reason, _ in error.failures.values()}
        raise refused("; ".join(sorted(reasons)), ROOM) from None
    on_first(lambda: finished(part, folder, {"steps": steps, "names": sorted(names)}))


def emptied(part: Path, folder: Path) -> None:
    if folder.exists() and not (folder / INDEX).is_file():
        raise refused(f"{folder} exists, and is no checkpoint", "name a folder that is not there")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)


def finished(part: Path, folder: Path, about: Mapping[str, Any]) -> None:
    (part / INDEX).write_text(json.dumps({"version": VERSION, **about}, indent=1) + "\n")
    old = before(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def before(folder: Path) -> Path:
    """Where an older checkpoint is for a moment, while a new one takes its place."""
    return folder.with_name(folder.name + ".old")


def resume(folder: Path, state: DeviceState, steps: int) -> int:
    """Fill everything that is here, and let learning rates come to where they were."""
    if steps:
        raise refused("this Trainer has made steps already", "resume with a new Trainer")
    done: list[int] = []
    everywhere(lambda: done.append(fill(folder, state)))
    return done[0]


def fill(folder: Path, state: DeviceState) -> int:
    found = about(folder)
    steps: int = found["steps"]
    reader = Reader(folder, frozenset(found["names"]))
    for bucket in state.buckets.values():
        reader.fill(bucket)
        if bucket.scheduler is not None:
            forward(bucket.scheduler, steps)
    state.origin = reader.fill
    return steps


def about(folder: Path) -> dict[str, Any]:
    """What was said when it was saved."""
    path, old = folder / INDEX, before(folder)
    if not path.is_file() and old.is_dir():
        raise refused(f"{folder} was not finished", f"rename {old.name}, the one before, to it")
    if not path.is_file():
        raise refused(
            f"{folder} is no checkpoint", "name a folder that trainer.save wrote, where all can see"
        )
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("version") != VERSION:
        raise refused(f"{folder} was written by another version of Piper", "use that one")
    return found


@dataclass(frozen=True)
class Saved:
    """A piece in a checkpoint: what it is of, where it begins, and how long it is."""

    kind: str
    state: str  # of an optimizer; of the parameter itself, ""
    first: int
    length: int
    key: str

    def meets(self, first: int, length: int) -> bool:
        """Whether it has something of a part of its tensor; what is not cut belongs to all."""
        inside = self.first < first + length and first < self.first + self.length
        return inside or self.kind != PARAMETER


@dataclass
class Reader:
    """A checkpoint's pieces, by the name of the parameter that they belong to."""

    folder: Path
    names: frozenset[str]  # of all that the model had
    known: dict[str, list[Saved]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.metadata = dcp.FileSystemReader(self.folder).read_metadata().state_dict_metadata
        for key, found in self.metadata.items():
            kind, state, rest = key.split("|", 2)
            name, _, first = rest.rpartition("|")
            length = torch.Size(found.size).numel()
            self.known.setdefault(name, []).append(Saved(kind, state, int(first), length, key))

    def fill(self, bucket: BucketState) -> None:
        parts = [part for part in bucket.parts() if part[3].numel() and self.has(part[0])]
        tensors = self.read(
            {one.key for name, first, _, p in parts for one in self.of(name, first, p.numel())}
        )
        for name, first, _, parameter in parts:
            held = self.states(tensors, name, first, parameter)
            flat = held.pop("")
            if flat.dtype != parameter.dtype:
                raise self.unlike(f"{name} is {flat.dtype} there, {parameter.dtype} here")
            parameter.data.copy_(flat)
            if bucket.optimizer is not None and held:
                moved = on_its_device(bucket.optimizer, parameter, held)
                bucket.optimizer.state[parameter] = moved

    def has(self, name: str) -> bool:
        """Whether it is to be filled: what no step had used has its first values."""
        if name not in self.names:
            raise self.unlike(f"it has no {name}")
        return name in self.known

    def of(self, name: str, first: int, length: int) -> list[Saved]:
        """All pieces that a part of a parameter needs."""
        return [one for one in self.known[name] if one.meets(first, length)]

    def read(self, keys: Collection[str]) -> Tensors:
        import torch.distributed.checkpoint as dcp

        found = {
            key: torch.empty(self.metadata[key].size, dtype=self.metadata[key].properties.dtype)
            for key in keys
        }
        if found:
            with quiet():
                dcp.load(found, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        return found

    def states(
        self, tensors: Tensors, name: str, first: int, parameter: torch.nn.Parameter
    ) -> dict[str, Any]:
        """A part of the parameter ("") and of all that its optimizer had."""
        pieces: dict[tuple[str, str], list[Saved]] = {}
        for one in self.of(name, first, parameter.numel()):
            pieces.setdefault((one.kind, one.state), []).append(one)
        held: dict[str, Any] = {}
        for (kind, state), found in pieces.items():
            value = tensors[found[0].key]
            if kind == PARAMETER:
                value = joined(tensors, found, first, parameter)
                if value is None:
                    raise self.unlike(f"{name} has another size there")
            held[state] = value.item() if kind == NUMBER else value
        return held

    def unlike(self, what: str) -> InputError:
        return refused(
            f"{self.folder} is of another model: {what}", "build the model that it was saved of"
        )


def joined(
    tensors: Tensors, pieces: Collection[Saved], first: int, parameter: torch.nn.Parameter
) -> torch.Tensor | None:
    """The elements of a part, of all the pieces it lies in; None if some are missing."""
    length, filled = parameter.numel(), 0
    whole = next(tensors[one.key] for one in pieces).new_empty(length)
    for one in pieces:
        low, high = max(first, one.first), min(first + length, one.first + one.length)
        whole[low - first : high - first] = tensors[one.key][low - one.first : high - one.first]
        filled += high - low
    return whole.view(parameter.shape) if filled == length else None


def on_its_device(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, held: Mapping[str, Any]
) -> dict[str, Any]:
    """Beside the parameter; single numbers only where the optimizer's kernels read them."""
    groups = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    group: dict[str, Any] = next(groups, {})
    beside = group.get("fused") or group.get("capturable")

    def moved(state: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        single = value.dim() == 0 and (state == STEP or parameter.dim() > 0)
        return value.to("cpu" if single and not beside else parameter.device)

    return {state: moved(state, value) for state, value in held.items()}


def refused(what: str, fix: str) -> InputError:
    return InputError("checkpoint", Problem(what, fix))


def on_first(act: Callable[[], None]) -> None:
    """On the first process; if it fails there, it fails everywhere."""
    everywhere(act if not dist.is_initialized() or dist.get_rank() == 0 else lambda: None)


def everywhere(act: Callable[[], None]) -> None:
    """On all processes; if it fails on one, it fails on all, so that none waits for it."""
    error: Exception | None = None
    try:
        act()
    except (OSError, InputError) as found:
        error = found if isinstance(found, InputError) else refused(str(found), ROOM)
    reasons: list[str] = [str(error or "")] * world()
    if world() > 1:
        dist.all_gather_object(reasons, str(error or ""))
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason:
            raise refused(f"it failed on process {rank}", f"there: {reason}")


@contextmanager
def quiet() -> Iterator[None]:
    """torch says that one process is alone, which is known."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        yield
