"""Pretrained weights: safetensors files as Hugging Face has them, read under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from piper.runtime.checkpoint.format.files import read_part
from piper.runtime.checkpoint.format.problems import damaged, refused
from piper.runtime.checkpoint.format.safetensors_format import Entry, read_header, tensor_of
from piper.runtime.checkpoint.format.strict_values import WRONG, parsed_json, plain_name
from piper.runtime.checkpoint.index import Piece
from piper.runtime.checkpoint.model_names import ModelTensor
from piper.runtime.checkpoint.pieces import Pieces
from piper.runtime.checkpoint.reader import States, put
from piper.runtime.state.device_state import BucketState, HeldPart
from piper.runtime.state.element_runs import element_runs

MAP = "model.safetensors.index.json"
SUFFIX = ".safetensors"
FORMATS = "give a .safetensors file, a folder of such files, or what trainer.save wrote"
Rename = Callable[[str], str]  # from a name in the model to the name in the files
Place = tuple[Path, Entry]  # where a tensor is


@dataclass(frozen=True)
class Weights:
    """Tensors of a model in files, by the name of the parameter; they fill buckets."""

    places: Mapping[str, Place]

    @property
    def known(self) -> Collection[str]:
        return self.places.keys()

    def fill(self, bucket: BucketState) -> None:
        put(bucket, self.states_of(bucket))

    def states_of(self, bucket: BucketState) -> list[States]:
        return [
            {"": self.part(part)} if part.name in self.places and part.parameter.numel() else {}
            for part in bucket.parts()
        ]

    def part(self, part: HeldPart) -> torch.Tensor:
        """A part of a tensor: only its bytes are read, and those between them."""
        path, entry = self.places[part.name]
        runs = element_runs(part.order, part.shape, part.first, part.parameter.numel())
        low, high, size = runs[0].start, runs[-1].start + runs[-1].length, entry.dtype.itemsize
        content = read_part(path, entry.start + low * size, (high - low) * size)
        flat = tensor_of(content, entry.dtype, [high - low])
        found = flat.new_empty(part.parameter.numel())
        for start, length, offset in runs:
            found[offset : offset + length] = flat[start - low : start - low + length]
        return found.view(part.parameter.shape)

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name not in self.places or not like.numel():
            return like
        part = HeldPart(name, 0, like.shape, torch.nn.Parameter(like, requires_grad=False))
        return self.part(part).view(like.shape)

    def pieces(self, names: Collection[str]) -> Pieces:
        found = []
        for name in sorted(names):
            path, entry = self.places[name]
            content = read_part(path, entry.start, entry.nbytes)
            found.append((Piece(name), tensor_of(content, entry.dtype, [-1])))
        return found


def files_of(path: Path) -> list[Path]:
    """The safetensors files at a path. Other formats may run code when they are read."""
    if path.is_file() and path.suffix == SUFFIX:
        return [path]
    there = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    found = [one for one in there if one.is_file()]  # reading a pipe would never end
    if found:
        return found
    what = "is not a file of weights that Piper reads" if path.exists() else "does not exist"
    raise refused(f"{path} {what}", FORMATS)


def entries(path: Path) -> Iterator[tuple[str, Place]]:
    """Every tensor of the files at a path. An index must be right about all that it names."""
    files = files_of(path)
    found = {
        name: (file, entry) for file in files for name, entry in read_header(file).entries.items()
    }
    index = path / MAP
    for name, file in mapped(index).items() if index.is_file() else ():
        if name not in found or found[name][0].name != file:
            raise damaged(index, f"says that {name} is in {file}, and it is not")
    return iter(found.items())


def mapped(index: Path) -> dict[str, str]:
    try:
        rows = parsed_json(index.read_bytes())["weight_map"]
        return {str(name): plain_name(file) for name, file in rows.items()}
    except WRONG:
        raise damaged(index, "is not an index of weights") from None


def weights_at(path: Path, tensors: Sequence[ModelTensor], rename: Rename | None) -> Weights:
    """Tensors of the model that the files have, by all their names in the model."""
    there, found = dict(entries(path)), dict[str, Place]()
    for one in tensors:
        names = [rename(name) if rename else name for name in one.names]
        place = next((there[name] for name in names if name in there), None)
        if place is not None:
            found.update(dict.fromkeys(one.names, place))
    return Weights(found)
