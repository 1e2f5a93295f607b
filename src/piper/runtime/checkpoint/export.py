"""The weights as Hugging Face has them: whole tensors with the model's names, in several files.

A tensor may be spread over devices. Each writes its elements to where they belong in the file.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from piper.errors import InputError
from piper.runtime.checkpoint.description import names_of
from piper.runtime.checkpoint.format.files import write_new
from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.format.replaced_weights import index_name, put_in_place, weights_in
from piper.runtime.checkpoint.format.safetensors_format import NAMES, Entry, bytes_of, header_of
from piper.runtime.checkpoint.layout import Layout, Written, in_sources, whole
from piper.runtime.checkpoint.model_names import ModelTensor, by_name
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.pieces import Turns, chunks, shifts_of
from piper.runtime.checkpoint.reader import HeldPieces
from piper.runtime.checkpoint.save import refuse_unseen
from piper.runtime.checkpoint.unused import Initial
from piper.runtime.checkpoint.weights import Rename
from piper.runtime.hardware import settle
from piper.runtime.state.device_state import DeviceState
from piper.runtime.state.element_runs import ElementRun, Overlap, element_runs


@dataclass(frozen=True)
class WeightFile:
    """A file to be written. It has another name until all files are complete."""

    name: str
    tensors: tuple[ModelTensor, ...]  # under their names in the file
    entries: Mapping[str, Entry]
    header: bytes
    nbytes: int

    def aside(self, folder: Path, sign: str) -> Path:
        return folder / f".{self.name}.{sign}"


@dataclass(frozen=True)
class Aside:
    """Where elements of a model's tensors belong in files that are being written."""

    paths: Mapping[str, Path]  # of the file that has a tensor
    entries: Mapping[str, Entry]
    layout: Layout

    def put(self, name: str, runs: Sequence[ElementRun], tensor: torch.Tensor) -> None:
        """Write elements of a tensor of the model, in the type of the files."""
        segments = self.layout[name].segments
        content = tensor.to(self.entries[segments[0].source].dtype).cpu().contiguous()
        for source, group in groupby(in_sources(runs, segments), lambda found: found[0].source):
            pieces = [piece for _, piece in group]
            put_into(self.paths[source], self.entries[source], pieces, content)


def aside(folder: Path, sign: str, files: Sequence[WeightFile], layout: Layout) -> Aside:
    paths = {name: file.aside(folder, sign) for file in files for name in file.entries}
    entries = {name: entry for file in files for name, entry in file.entries.items()}
    return Aside(paths, entries, layout)


def planned(tensors: Sequence[ModelTensor], limit: int, file: str) -> list[WeightFile]:
    """Tensors in their order, in files of at most `limit` bytes, or of one tensor."""
    groups: list[list[ModelTensor]] = [[]]
    for one in tensors:
        if groups[-1] and sum(o.nbytes for o in groups[-1]) + one.nbytes > limit:
            groups.append([])
        groups[-1].append(one)
    many = len(groups)
    names = [f"{file}-{k:05}-of-{many:05}.safetensors" for k in range(1, many + 1)]
    names = names if many > 1 else [f"{file}.safetensors"]
    return [weight_file(name, group) for name, group in zip(names, groups, strict=True)]


def refuse_names(tensors: Sequence[ModelTensor], rename: Rename) -> None:
    if not tensors:
        raise refused("no tensor was chosen", "let only= accept some names of the model")
    written: dict[str, str] = {}
    for one in tensors:
        before = written.setdefault(rename(one.name), one.name)
        if before != one.name:
            what = f"{before} and {one.name} would both be written as {rename(one.name)}"
            raise refused(what, "let rename= give them different names")


def refuse_types(tensors: Sequence[ModelTensor]) -> None:
    for one in tensors:
        if one.dtype not in NAMES:
            raise InputError.of(
                "export",
                f"{one.name} is of type {one.dtype}, and safetensors files have no such type",
                f"leave it out: only=lambda name: name != {one.name!r}; or call weights = "
                "trainer.state_dict() in all processes, and torch.save(weights, path) in the first",
            )


def renamed(tensors: Sequence[ModelTensor], rename: Rename) -> Written:
    """Every tensor as it is in the model, under another name."""
    layout = {one.name: whole(rename(one.name), one.shape) for one in tensors}
    return Written({rename(one.name): one.shape for one in tensors}, layout)


def in_files(tensors: Sequence[ModelTensor], written: Written, rename: Rename) -> list[ModelTensor]:
    """The tensors that files get, in the order of the model."""
    found = dict[str, ModelTensor]()
    for one in tensors:
        tied = tuple(map(rename, one.names[1:]))
        for name in dict.fromkeys(each.source for each in written.layout[one.name].segments):
            there = ModelTensor(name, (name, *tied), one.dtype, written.shapes[name])
            found.setdefault(name, there)
    return list(found.values())


def weight_file(name: str, tensors: Sequence[ModelTensor]) -> WeightFile:
    """Tied parameters are there once, under their first name; the header has the others."""
    tied = {other: one.name for one in tensors for other in one.names[1:]}
    shapes = {one.name: (one.dtype, one.shape) for one in tensors}
    header, content = header_of(shapes, {"format": "pt", **tied})
    return WeightFile(name, tuple(tensors), header.entries, content, header.nbytes)


def export(
    peers: Peers, folder: Path, state: DeviceState, turns: Turns,
    tensors: list[ModelTensor], initial: Initial, limit: int, rename: Rename, file: str,
    written: Written | None = None,
) -> None:  # fmt: skip
    """All processes write. The files appear when all are complete, in place of older ones."""
    settle(state.device)
    refuse_names(tensors, rename)
    refuse_types(tensors)
    written = written or renamed(tensors, rename)
    files = planned(in_files(tensors, written, rename), limit, file)
    names = by_name(tensors)
    everywhere = set[str]().union(*peers.everyone(names_of(state)))
    used = {names[name].name for name in everywhere if name in names}
    sign = peers.from_first(lambda: prepared(folder, files))
    target = aside(folder, sign, files, written.layout)
    try:
        peers.each(lambda: refuse_unseen(folder, files[0].aside(folder, sign).name))
        peers.each(lambda: write_parts(target, state, turns, names))
        rest = [one for one in tensors if one.name not in used]
        peers.on_first(lambda: write_rest(target, state, rest, initial))
        if peers.from_first(lambda: bool(weights_in(folder, file))):
            keep_unused(peers, state, used | everywhere, names)
        peers.on_first(lambda: finished(folder, sign, files, file))
    finally:
        if peers.rank == 0:
            remove_aside(folder, sign, files)


def prepared(folder: Path, files: Sequence[WeightFile]) -> str:
    """Empty files of the right size, with their headers."""
    folder.mkdir(parents=True, exist_ok=True)
    sign = secrets.token_hex(8)
    try:
        for file in files:
            path = file.aside(folder, sign)
            write_new(path, [memoryview(file.header)])
            os.truncate(path, file.nbytes)
    except OSError:
        remove_aside(folder, sign, files)
        raise
    return sign


def remove_aside(folder: Path, sign: str, files: Sequence[WeightFile]) -> None:
    for file in files:
        file.aside(folder, sign).unlink(missing_ok=True)


def write_parts(
    target: Aside, state: DeviceState, turns: Turns, names: Mapping[str, ModelTensor]
) -> None:
    """What this device holds. Devices that hold the same divide it."""
    for value, bucket in state.buckets.items():
        if value not in turns:
            continue
        shifts = shifts_of(bucket, *turns[value])
        for part in bucket.parts():
            for piece, tensor in chunks(part, "", part.parameter.data):
                one = names.get(part.name)
                if shifts.is_mine(tensor.numel()) and one is not None:
                    runs = element_runs(part.order, part.shape, piece.first, tensor.numel())
                    target.put(one.name, runs, tensor)


def put_into(path: Path, entry: Entry, pieces: Sequence[Overlap], content: torch.Tensor) -> None:
    """Write elements to where they belong in a tensor of a file."""
    size, view, file = entry.dtype.itemsize, bytes_of(content), os.open(path, os.O_WRONLY)
    try:
        for here, there, length in pieces:
            part = view[here * size : (here + length) * size]
            written_at(file, part, entry.start + there * size)
        os.fsync(file)
    finally:
        os.close(file)


def written_at(file: int, content: memoryview, start: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], start + done)


def write_rest(
    target: Aside, state: DeviceState, rest: Sequence[ModelTensor], initial: Initial
) -> None:
    """Parameters that no step has used: as they are in an older checkpoint, or at the start."""
    for one in rest:
        value = initial(one.name)
        value = state.origin.whole(one.name, value) if state.origin else value
        target.put(one.name, [ElementRun(0, value.numel(), 0)], value.reshape(-1))


def keep_unused(
    peers: Peers, state: DeviceState, used: set[str], names: Mapping[str, ModelTensor]
) -> None:
    """What was loaded and no step has used may lie in files that are about to be replaced."""
    origin = state.origin
    if origin is None:
        return
    tied = {name for name, one in names.items() if one.name in used}
    rest = set(origin.known) - used - tied
    pieces = peers.each(lambda: origin.pieces(rest))
    state.origin = HeldPieces(pieces) if pieces else None


def finished(folder: Path, sign: str, files: Sequence[WeightFile], file: str) -> None:
    total = sum(one.nbytes for each in files for one in each.tensors)
    body = {"metadata": {"total_size": total}, "weight_map": dict(weight_map(files))}
    index = index_name(file), json.dumps(body, indent=2).encode()
    new = {one.name: one.aside(folder, sign) for one in files}
    put_in_place(folder, new, index if len(files) > 1 else None, sign, file)


def weight_map(files: Sequence[WeightFile]) -> Iterator[tuple[str, str]]:
    return ((there, file.name) for file in files for there in file.entries)
