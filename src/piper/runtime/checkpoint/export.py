"""The weights as Hugging Face has them: whole tensors with the model's names, in several files.

A tensor may be spread over devices. Each writes its elements to where they belong in the file.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from piper.runtime.checkpoint.description import names_of
from piper.runtime.checkpoint.format.files import replace_file, sync_folder, write_new
from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.format.safetensors_format import Entry, bytes_of, header_of
from piper.runtime.checkpoint.model_names import ModelTensor, by_name
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.pieces import Turns, chunks, shifts_of
from piper.runtime.checkpoint.save import refuse_unseen
from piper.runtime.checkpoint.weights import MAP, Rename
from piper.runtime.observe.measure import settle
from piper.runtime.state.device_state import DeviceState
from piper.runtime.state.element_runs import ElementRun, element_runs

Initial = Callable[[str], torch.Tensor]  # the first value of a parameter or buffer


@dataclass(frozen=True)
class WeightFile:
    """A file to be written. It has another name until all files are complete."""

    name: str
    tensors: tuple[ModelTensor, ...]
    written: dict[str, str]  # the name in the file of each name in the model
    entries: dict[str, Entry]  # by the name in the model
    header: bytes
    nbytes: int

    def aside(self, folder: Path, sign: str) -> Path:
        return folder / f".{self.name}.{sign}"


def planned(
    tensors: Sequence[ModelTensor], limit: int, rename: Rename, file: str
) -> list[WeightFile]:
    """Tensors in their order, in files of at most `limit` bytes, or of one tensor."""
    refuse_names(tensors, rename)
    groups: list[list[ModelTensor]] = [[]]
    for one in tensors:
        if groups[-1] and sum(o.nbytes for o in groups[-1]) + one.nbytes > limit:
            groups.append([])
        groups[-1].append(one)
    many = len(groups)
    names = [f"{file}-{k:05}-of-{many:05}.safetensors" for k in range(1, many + 1)]
    names = names if many > 1 else [f"{file}.safetensors"]
    return [weight_file(name, group, rename) for name, group in zip(names, groups, strict=True)]


def refuse_names(tensors: Sequence[ModelTensor], rename: Rename) -> None:
    if not tensors:
        raise refused("no tensor was chosen", "let only= accept some names of the model")
    written: dict[str, str] = {}
    for one in tensors:
        before = written.setdefault(rename(one.name), one.name)
        if before != one.name:
            what = f"{before} and {one.name} would both be written as {rename(one.name)}"
            raise refused(what, "let rename= give them different names")


def weight_file(name: str, tensors: Sequence[ModelTensor], rename: Rename) -> WeightFile:
    """Tied parameters are there once, under their first name; the header has the others."""
    written = {one.name: rename(one.name) for one in tensors}
    tied = {rename(other): written[one.name] for one in tensors for other in one.names[1:]}
    shapes = {written[one.name]: (one.dtype, one.shape) for one in tensors}
    header, content = header_of(shapes, {"format": "pt", **tied})
    entries = {own: header.entries[there] for own, there in written.items()}
    return WeightFile(name, tuple(tensors), written, entries, content, header.nbytes)


def export(
    peers: Peers, folder: Path, state: DeviceState, turns: Turns,
    tensors: list[ModelTensor], initial: Initial, limit: int, rename: Rename, file: str,
) -> None:  # fmt: skip
    """All processes write. The files appear when all are complete."""
    settle(state.device)
    files = planned(tensors, limit, rename, file)
    names = by_name(tensors)
    used = {names[n].name for each in peers.everyone(names_of(state)) for n in each if n in names}
    sign = peers.from_first(lambda: prepared(folder, files))
    try:
        peers.each(lambda: refuse_unseen(folder, files[0].aside(folder, sign).name))
        peers.each(lambda: write_parts(folder, sign, files, state, turns, names))
        rest = [one for one in tensors if one.name not in used]
        peers.on_first(lambda: write_rest(folder, sign, files, state, rest, initial))
        peers.on_first(lambda: finished(folder, sign, files))
    finally:
        if peers.rank == 0:
            remove_aside(folder, sign, files)


def prepared(folder: Path, files: Sequence[WeightFile]) -> str:
    """Empty files of the right size, with their headers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(file.name for file in files), MAP):
        if (folder / name).exists():
            raise refused(f"{folder / name} exists", "choose a folder without weights")
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
    folder: Path, sign: str, files: Sequence[WeightFile], state: DeviceState, turns: Turns,
    names: Mapping[str, ModelTensor],
) -> None:  # fmt: skip
    """What this device holds. Devices that hold the same divide it."""
    where = {one.name: file for file in files for one in file.tensors}
    for value, bucket in state.buckets.items():
        if value not in turns:
            continue
        shifts = shifts_of(bucket, *turns[value])
        for part in bucket.parts():
            for piece, tensor in chunks(part, "", part.parameter.data):
                one = names.get(part.name)
                if shifts.is_mine(tensor.numel()) and one is not None:
                    runs = element_runs(part.order, part.shape, piece.first, tensor.numel())
                    file = where[one.name]
                    put_into(file.aside(folder, sign), file.entries[one.name], runs, tensor)


def put_into(path: Path, entry: Entry, runs: Sequence[ElementRun], tensor: torch.Tensor) -> None:
    """Write elements to where they belong in the whole tensor, in its type."""
    content, size = tensor.to(entry.dtype).cpu().contiguous(), entry.dtype.itemsize
    view, file = bytes_of(content), os.open(path, os.O_WRONLY)
    try:
        for start, length, offset in runs:
            part = view[offset * size : (offset + length) * size]
            written_at(file, part, entry.start + start * size)
        os.fsync(file)
    finally:
        os.close(file)


def written_at(file: int, content: memoryview, start: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], start + done)


def write_rest(
    folder: Path, sign: str, files: Sequence[WeightFile], state: DeviceState,
    rest: Sequence[ModelTensor], initial: Initial,
) -> None:  # fmt: skip
    """Parameters that no step has used: as they are in an older checkpoint, or at the start."""
    where = {one.name: file for file in files for one in file.tensors}
    for one in rest:
        value = initial(one.name)
        value = state.origin.whole(one.name, value) if state.origin else value
        file, run = where[one.name], ElementRun(0, value.numel(), 0)
        put_into(file.aside(folder, sign), file.entries[one.name], [run], value.reshape(-1))


def finished(folder: Path, sign: str, files: Sequence[WeightFile]) -> None:
    for file in files:
        file.aside(folder, sign).rename(folder / file.name)
    sync_folder(folder)
    if len(files) > 1:
        total = sum(one.nbytes for file in files for one in file.tensors)
        body = {"metadata": {"total_size": total}, "weight_map": dict(weight_map(files))}
        replace_file(folder / MAP, json.dumps(body, indent=2).encode())


def weight_map(files: Sequence[WeightFile]) -> Iterator[tuple[str, str]]:
    return ((there, file.name) for file in files for there in file.written.values())
