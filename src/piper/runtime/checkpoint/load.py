"""Loading weights alone, before training: of Hugging Face, or of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piper.errors import InputError
from piper.names import amount
from piper.runtime.checkpoint.folder import is_checkpoint
from piper.runtime.checkpoint.format.files import digest_of
from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.format.safetensors_format import read_header
from piper.runtime.checkpoint.index import StoredPiece
from piper.runtime.checkpoint.layout import Arrange, Layout, Shapes, as_they_are
from piper.runtime.checkpoint.model_names import ModelTensor
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.pieces import Pieces
from piper.runtime.checkpoint.reader import Reader, States, put
from piper.runtime.checkpoint.resume import reader_of
from piper.runtime.checkpoint.weights import (
    Rename,
    Weights,
    entries,
    files_of,
    layout_of,
    weights_at,
)
from piper.runtime.state.device_state import BucketState, DeviceState, Origin

LOG = logging.getLogger("piper")
MISSING = " is missing"
NAMES = "give rename=, a function from names of the model to names in the files"


def load(
    peers: Peers, path: Path, state: DeviceState, tensors: Sequence[ModelTensor],
    own: Collection[str], rename: Rename | None, strict: bool, arrange: Arrange | None = None,
) -> None:  # fmt: skip
    """Fill these tensors on this device, of all that the model has as its `own`. If that fails,
    nothing is changed."""

    def read() -> tuple[Reader | Weights, list[tuple[BucketState, list[States]]]]:
        layout = layout_at(path, arrange)
        notes = misfits(path, layout, tensors, rename, own)
        fix = fix_of_names(layout) if rename else NAMES
        if notes and strict:
            lost = ": what is missing then keeps its first values" if is_missing(notes[0]) else ""
            raise misfit(path, notes, f"{fix}; or strict=False, to load what there is{lost}")
        if sum(map(is_missing, notes)) == len(tensors):
            raise refused(f"{path} has no tensor of the model: {some_of(notes)}", fix)
        if notes and peers.rank == 0:
            count = amount(len(notes), "name")
            LOG.warning("%s in %s do not fit the model: %s", count, path, some_of(notes))
        source = source_at(path, tensors, rename, arrange)
        return source, [(one, source.states_of(one)) for one in state.buckets.values()]

    if not tensors:
        raise refused("no tensor was chosen", "let only= accept some names of the model")
    refuse_different(peers, path)
    source, buckets = peers.each(read)
    for bucket, states in buckets:
        put(bucket, states)
    state.origin = Layered(state.origin, source) if state.origin else source
    state.reads += 1


@dataclass(frozen=True)
class Layered:
    """What was loaded last, and below it what was loaded before."""

    below: Origin
    above: Origin

    @property
    def known(self) -> Collection[str]:
        return {*self.below.known, *self.above.known}

    def fill(self, bucket: BucketState) -> None:
        self.below.fill(bucket)
        self.above.fill(bucket)

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.above.whole(name, self.below.whole(name, like))

    def pieces(self, names: Collection[str]) -> Pieces:
        above = set(names) & set(self.above.known)
        return [*self.above.pieces(above), *self.below.pieces(set(names) - above)]


def source_at(
    path: Path, tensors: Sequence[ModelTensor], rename: Rename | None, arrange: Arrange | None
) -> Reader | Weights:
    if is_checkpoint(path):
        return chosen(reader_of(path, only_weights=True), tensors, rename)
    return weights_at(path, tensors, rename, arrange)


def chosen(reader: Reader, tensors: Sequence[ModelTensor], rename: Rename | None) -> Reader:
    """These tensors alone, under their names in the model."""
    known = dict[str, list[StoredPiece]]()
    for one in tensors:
        names = [rename(name) if rename else name for name in one.names]
        there = next((reader.known[name] for name in names if name in reader.known), None)
        for name in one.names if there is not None else ():
            known[name] = [replace(s, piece=replace(s.piece, name=name)) for s in there or ()]
    reader.known = known
    return reader


def misfits(
    path: Path, layout: Layout, tensors: Sequence[ModelTensor], rename: Rename | None,
    own: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Names that are missing, or that no tensor of the model has. Other shapes are refused at
    once."""
    known = {name: stored.shape for name, stored in layout.items()}
    refuse_shapes(path, known, tensors, rename)
    return mismatches(known, tensors, rename, own)


def misfit(path: Path, notes: Sequence[str], fix: str) -> InputError:
    return refused(f"{path} does not fit the model: {some_of(notes)}", fix)


def some_of(notes: Sequence[str]) -> str:
    more = f" (and {len(notes) - 3} more)" if notes[3:] else ""
    return f"{'; '.join(notes[:3])}{more}"


def fix_of_names(layout: Layout) -> str:
    there = next(iter(layout), "")
    return f"let rename= turn names of the model into names in the files, such as {there}"


def is_missing(note: str) -> bool:
    return note.endswith(MISSING)


def layout_at(path: Path, arrange: Arrange | None = None) -> Layout:
    """The tensors that are there."""
    if is_checkpoint(path):
        there = reader_of(path)
        model = there.index.model
        return as_they_are({name: tuple(model[name][0]) for name in model if name in there.known})
    return layout_of(dict(entries(path)), arrange)


def mismatches(
    there: Shapes, tensors: Sequence[ModelTensor], rename: Rename | None, own: Collection[str]
) -> list[str]:
    """Names of the model that are not there, and those there that the model does not have."""
    every = {*own, *(name for one in tensors for name in one.names)}
    names = {name: rename(name) if rename else name for name in every}
    missing = [
        f"{one.name}{'' if rename is None else f' ({names[one.name]} in the files)'}{MISSING}"
        for one in tensors
        if not any(names[n] in there for n in one.names)
    ]
    return missing + [f"{name} is unknown" for name in sorted(set(there) - set(names.values()))]


def refuse_shapes(
    path: Path, there: Shapes, tensors: Sequence[ModelTensor], rename: Rename | None
) -> None:
    for one in tensors:
        for name in one.names:
            shape = there.get(rename(name) if rename else name, one.shape)
            if shape != one.shape:
                raise refused(
                    f"{path} has {name} as {list(shape)}, the model as {list(one.shape)}",
                    "build the model that was saved",
                )


def refuse_different(peers: Peers, path: Path) -> None:
    """All processes must see the same files."""
    views = peers.everyone(peers.each(lambda: view(path)))
    for rank, one in enumerate(views):
        if one != views[0]:
            raise refused(
                f"{path} is not the same for all processes: device {rank} sees other files",
                "give a path that all hosts share, or the same files on each of them",
            )


def view(path: Path) -> str:
    """What a process sees: the headers of all files."""
    if is_checkpoint(path):
        return digest_of(reader_of(path).index.to_bytes())
    headers = [sorted(read_header(one).entries.items()) for one in files_of(path)]
    return digest_of(repr(headers).encode())
