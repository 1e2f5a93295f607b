"""Pretrained weights: safetensors files as Hugging Face has them, read under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path

import torch

from piper.runtime.checkpoint.format.files import read_part
from piper.runtime.checkpoint.format.problems import damaged, refused
from piper.runtime.checkpoint.format.safetensors_format import Entry, read_header, tensor_of
from piper.runtime.checkpoint.format.strict_values import WRONG, parsed_json, plain_name
from piper.runtime.checkpoint.index import Piece
from piper.runtime.checkpoint.layout import Arrange, Layout, Stored, as_they_are, in_sources
from piper.runtime.checkpoint.model_names import ModelTensor
from piper.runtime.checkpoint.pieces import Pieces
from piper.runtime.checkpoint.reader import States, put
from piper.runtime.state.device_state import BucketState, HeldPart
from piper.runtime.state.element_runs import ElementRun, element_runs

MAP = "model.safetensors.index.json"
SUFFIX = ".safetensors"
FORMATS = (
    "give a .safetensors file, a folder of such files, or what trainer.save wrote; give weights in "
    "another format to the model, with load_state_dict, before you make the Trainer"
)
Rename = Callable[[str], str]  # from a name in the model to the name in the files
Place = tuple[Path, Entry]  # where a tensor is


@dataclass(frozen=True)
class Weights:
    """Tensors of a model in files; they fill buckets."""

    places: Mapping[str, Place]  # by the name in the files
    layout: Layout  # of tensors of the model, by all their names

    @property
    def known(self) -> Collection[str]:
        return self.layout.keys()

    def fill(self, bucket: BucketState) -> None:
        put(bucket, self.states_of(bucket))

    def states_of(self, bucket: BucketState) -> list[States]:
        return [
            {"": self.part(part)} if part.name in self.layout and part.parameter.numel() else {}
            for part in bucket.parts()
        ]

    def part(self, part: HeldPart) -> torch.Tensor:
        runs = element_runs(part.order, part.shape, part.first, part.parameter.numel())
        return self.elements(part.name, runs).view(part.parameter.shape)

    def elements(self, name: str, runs: Sequence[ElementRun]) -> torch.Tensor:
        """Some of a tensor: only their bytes are read, and those between them in the files."""
        segments = self.layout[name].segments
        dtypes = {self.places[one.source][1].dtype for one in segments}
        dtype = reduce(torch.promote_types, dtypes)
        found = torch.empty(sum(one.length for one in runs), dtype=dtype)
        for one, group in groupby(in_sources(runs, segments), itemgetter(0)):
            pieces = [piece for _, piece in group]
            low, high = pieces[0].target, pieces[-1].target + pieces[-1].length
            flat = self.read(one.source, low, high)
            for here, there, length in pieces:
                found[here : here + length] = flat[there - low : there - low + length]
        return found

    def read(self, source: str, low: int, high: int) -> torch.Tensor:
        path, entry = self.places[source]
        size = entry.dtype.itemsize
        content = read_part(path, entry.start + low * size, (high - low) * size)
        return tensor_of(content, entry.dtype, [high - low])

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name not in self.layout or not like.numel():
            return like
        return self.all_of(name).view(like.shape)

    def all_of(self, name: str) -> torch.Tensor:
        return self.elements(name, [ElementRun(0, prod(self.layout[name].shape), 0)])

    def pieces(self, names: Collection[str]) -> Pieces:
        return [(Piece(name), self.all_of(name)) for name in sorted(names)]


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


def layout_of(places: Mapping[str, Place], arrange: Arrange | None) -> Layout:
    shapes = {name: entry.shape for name, (_, entry) in places.items()}
    return arrange(shapes) if arrange else as_they_are(shapes)


def weights_at(
    path: Path, tensors: Sequence[ModelTensor], rename: Rename | None, arrange: Arrange | None
) -> Weights:
    """Tensors of the model that the files have, by all their names in the model."""
    places, found = dict(entries(path)), dict[str, Stored]()
    there = layout_of(places, arrange)
    for one in tensors:
        names = [rename(name) if rename else name for name in one.names]
        stored = next((there[name] for name in names if name in there), None)
        if stored is not None:
            found.update(dict.fromkeys(one.names, stored))
    return Weights(places, found)
