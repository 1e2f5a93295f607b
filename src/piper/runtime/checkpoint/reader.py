"""Reading a checkpoint under any strategy: a device reads the pieces that overlap what it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from piper.runtime.checkpoint.format.files import digest_of, read_part
from piper.runtime.checkpoint.format.problems import damaged
from piper.runtime.checkpoint.format.safetensors_format import tensor_of
from piper.runtime.checkpoint.index import (
    NUMBER,
    PARAMETER,
    Index,
    StoredFile,
    StoredPiece,
    read_index,
)
from piper.runtime.checkpoint.pieces import EMA, STEP, Pieces
from piper.runtime.checkpoint.writer import type_name
from piper.runtime.state.device_state import BucketState, HeldPart
from piper.runtime.state.element_runs import ElementRun, element_runs, overlaps

Cache = dict[StoredPiece, torch.Tensor]  # what was read
States = dict[str, Any]  # of a part: its elements (""), and the states of its optimizer


@dataclass
class Reader:
    """A checkpoint's pieces, by the name of the parameter that they belong to."""

    folder: Path
    index: Index = field(default=None)  # type: ignore[assignment]  # read from the folder
    only_weights: bool = False  # without the states of optimizers
    known: dict[str, list[StoredPiece]] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)  # files whose headers were compared

    def __post_init__(self) -> None:
        self.index = self.index or read_index(self.folder)
        self.files = {one.name: one for one in self.index.files}
        for one in self.index.pieces:
            if one.piece.state and self.only_weights:
                continue
            self.known.setdefault(one.piece.name, []).append(one)

    def fill(self, bucket: BucketState) -> None:
        put(bucket, self.states_of(bucket))

    def states_of(self, bucket: BucketState) -> list[States]:
        """What belongs into a bucket, for each of its parts. Nothing is changed yet."""
        cache: Cache = {}
        trained = bucket.optimizer is not None
        return [self.states(part, trained, cache) for part in bucket.parts()]

    def states(self, part: HeldPart, trained: bool, cache: Cache) -> States:
        """A part of the parameter ("") and of each state of its optimizer."""
        if not part.parameter.numel():
            return {}
        pieces: dict[tuple[str, str], list[StoredPiece]] = {}
        for one in self.known.get(part.name, ()):
            if trained or not one.piece.state:
                pieces.setdefault((one.piece.kind, one.piece.state), []).append(one)
        held: States = {}
        for (kind, state), found in pieces.items():
            if kind == PARAMETER:
                held[state] = self.joined(found, part, cache)
            else:
                value = self.tensor(found[0], cache)
                held[state] = value.item() if kind == NUMBER else value.clone()
        if held and held.get("") is None:
            raise damaged(self.folder, f"has states of {part.name}, and not its elements")
        return held

    def joined(self, pieces: Iterable[StoredPiece], part: HeldPart, cache: Cache) -> torch.Tensor:
        """The elements of a part, from the pieces that overlap it."""
        whole, filled = None, 0
        wanted = element_runs(part.order, part.shape, part.first, part.parameter.numel())
        for one in pieces:
            for source, target, length in overlaps(runs_of(one, part.shape), wanted):
                tensor = self.tensor(one, cache)
                if whole is None:
                    whole = tensor.new_empty(part.parameter.numel())
                whole[target : target + length] = tensor.view(-1)[source : source + length]
                filled += length
        if whole is None or filled != whole.numel():
            raise damaged(self.folder, f"has only a part of {part.name}")
        return whole.view(part.parameter.shape)

    def tensor(self, one: StoredPiece, cache: Cache) -> torch.Tensor:
        """A piece, compared with its digest."""
        if one not in cache:
            self.check_header(self.files[one.file])
            content = read_part(self.folder / one.file, one.start, one.nbytes)
            if digest_of(content) != one.digest:
                raise damaged(self.folder / one.file, f"is damaged, in {one.piece.name}")
            cache[one] = tensor_of(content, one.type, one.shape)
        return cache[one]

    def check_header(self, file: StoredFile) -> None:
        if file.name in self.checked:
            return
        self.check_size(file)
        path = self.folder / file.name
        if digest_of(read_part(path, 0, file.header)) != file.digest:
            raise damaged(path, "is damaged, or of another checkpoint")
        self.checked.add(file.name)

    def check_size(self, file: StoredFile) -> None:
        path = self.folder / file.name
        if not path.is_file():
            raise damaged(path, "is missing")
        if path.stat().st_size != file.nbytes:
            raise damaged(path, f"has {path.stat().st_size} bytes, not {file.nbytes}")

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer. Returns `like` if no step had used it."""
        if name not in self.known or not like.numel():
            return like
        part = HeldPart(name, 0, like.shape, torch.nn.Parameter(like, requires_grad=False))
        return torch.as_tensor(self.states(part, False, {})[""])

    def pieces(self, names: Collection[str]) -> Pieces:
        """All pieces of these parameters."""
        found = [one for name in sorted(names) for one in self.known[name]]
        return [(one.piece, self.tensor(one, {})) for one in found]


class HeldPieces(Reader):
    """Pieces in memory: they fill buckets that are made later, as a checkpoint does."""

    def __init__(self, pieces: Pieces) -> None:
        self.tensors = {number: tensor for number, (_, tensor) in enumerate(pieces)}
        stored = tuple(
            StoredPiece(piece, type_name(tensor.dtype), tuple(tensor.shape), "", number, "")
            for number, (piece, tensor) in enumerate(pieces)
        )
        super().__init__(Path(), Index(0, "", 1, {}, (), (), (), stored, ()))

    def tensor(self, one: StoredPiece, cache: Cache) -> torch.Tensor:
        return self.tensors[one.start]


def runs_of(one: StoredPiece, shape: torch.Size) -> list[ElementRun]:
    return element_runs(one.piece.order, shape, one.piece.first, one.length)


def put(bucket: BucketState, states: Iterable[States]) -> None:
    """Put what was read into a bucket and its optimizer."""
    for k, (part, held) in enumerate(zip(bucket.parts(), states, strict=True)):
        if not held:
            continue
        parameter, rest = part.parameter, {key: held[key] for key in held if key}
        parameter.data.copy_(held[""])
        mean = rest.pop(EMA, None)
        if mean is not None and bucket.averaged:
            bucket.put_average(k, mean)
        if bucket.optimizer is not None and rest:
            moved = on_its_device(bucket, parameter, rest)
            bucket.optimizer.state[parameter] = in_its_type(parameter, held[""].dtype, moved)
    bucket.round_masters()


def on_its_device(
    bucket: BucketState, parameter: torch.nn.Parameter, held: Mapping[str, Any]
) -> dict[str, Any]:
    """States where they wait for the next update: on the device, or in host memory. Single numbers
    are on the device only if the optimizer reads them there."""
    groups = bucket.optimizer.param_groups if bucket.optimizer is not None else ()
    mine = (group for group in groups if any(p is parameter for p in group["params"]))
    group: dict[str, Any] = next(mine, {})
    on_device = group.get("fused") or group.get("capturable")
    host = torch.device("cpu")
    home = host if bucket.optimizer_on_host else bucket.device

    def moved(state: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        single = value.dim() == 0 and (state == STEP or parameter.dim() > 0)
        if single:
            return value.to(bucket.device if on_device else host)
        return value.to(home)

    return {state: moved(state, value) for state, value in held.items()}


def in_its_type(
    parameter: torch.nn.Parameter, was: torch.dtype, held: Mapping[str, Any]
) -> dict[str, Any]:
    """States that had the type of their parameter when they were saved still have it."""

    def typed(state: str, value: Any) -> Any:
        follows = isinstance(value, torch.Tensor) and value.dtype == was and state != STEP
        return value.to(parameter.dtype) if follows else value

    return {state: typed(state, value) for state, value in held.items()}
