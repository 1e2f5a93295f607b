"""The index of a checkpoint: what it is of, its files, and every piece with its digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from piper.runtime.checkpoint.format.problems import damaged
from piper.runtime.checkpoint.format.sealed_json import sealed, unsealed
from piper.runtime.checkpoint.format.strict_values import WRONG, count, plain_name, text
from piper.runtime.processes.wire_format import travels
from piper.runtime.state.element_order import NATURAL, ElementOrder

INDEX = "index.json"
VERSION = 2
PARAMETER, WHOLE, NUMBER = "parameter", "tensor", "number"  # the kinds of pieces
Described = dict[str, list[Any]]  # shape and dtype of every tensor of a model, by name


@travels
@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of a parameter, or of a state of its optimizer; of no device."""

    name: str
    kind: str = PARAMETER
    state: str = ""  # of the optimizer; "" is the parameter itself
    first: int = 0
    order: ElementOrder = NATURAL

    def __str__(self) -> str:
        """Its name in a file, which nothing reads.

        >>> str(Piece("head.weight", state="exp_avg", first=12))
        'head.weight|exp_avg|12'
        """
        return f"{self.name}|{self.state}|{self.first}{self.order}"


@travels
@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece in a file."""

    piece: Piece
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int  # in bytes
    digest: str

    @property
    def length(self) -> int:
        return prod(self.shape)

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        return self.length * self.type.itemsize

    def row(self) -> list[Any]:
        one, order = self.piece, self.piece.order
        place = [one.name, one.kind, one.state, one.first, [order.dim, order.blocks, order.ways]]
        return [*place, self.dtype, self.shape, self.file, self.start, self.digest]


@travels
@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint. The digest is of its header; tensors have their own."""

    name: str
    nbytes: int
    header: int  # bytes
    digest: str


@travels
@dataclass(frozen=True, slots=True)
class ProcessFile:
    """What a process keeps beside tensors: its random state, the position of its data."""

    rank: int
    replica: int
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Index:
    """Everything about a checkpoint but the bytes of its tensors."""

    steps: int
    saved: str  # when
    replicas: int  # parts of the data
    model: Described
    optimizers: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    files: tuple[StoredFile, ...]
    pieces: tuple[StoredPiece, ...]
    processes: tuple[ProcessFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.files)

    def to_bytes(self) -> bytes:
        return sealed(
            {
                "version": VERSION,
                "steps": self.steps,
                "saved": self.saved,
                "replicas": self.replicas,
                "optimizers": self.optimizers,
                "options": self.options,
                "model": self.model,
                "files": [asdict(one) for one in self.files],
                "processes": [asdict(one) for one in self.processes],
                "pieces": [one.row() for one in self.pieces],
            }
        )


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    found = unsealed(path, content)
    try:
        return parsed(found)
    except WRONG as error:
        what = f"is not an index that this version of Piper reads ({str(error)[:80]})"
        raise damaged(path, what) from None


def parsed(found: Mapping[str, Any]) -> Index:
    if found["version"] != VERSION:
        raise ValueError(f"version {str(found['version'])[:20]}")
    index = Index(
        steps=count(found["steps"]),
        saved=text(found["saved"]),
        replicas=count(found["replicas"]),
        model={text(name): [list(map(count, shape)), text(dtype)] for name, (shape, dtype) in
               found["model"].items()},
        optimizers=tuple(map(str, found["optimizers"])),
        options=tuple((str(name), str(value)) for name, value in found["options"]),
        files=tuple(stored_file(**row) for row in found["files"]),
        pieces=tuple(stored_piece(*row) for row in found["pieces"]),
        processes=tuple(process_file(**row) for row in found["processes"]),
    )  # fmt: skip
    refuse_outside(index)
    return index


def refuse_outside(index: Index) -> None:
    """Every piece is inside of a file, and of a tensor of the model."""
    files = {one.name: one for one in index.files}
    for file in index.files:
        if file.header > file.nbytes:
            raise ValueError(f"the header of {file.name}")
    for one in index.pieces:
        file, name = files[one.file], one.piece.name
        if not file.header <= one.start <= file.nbytes - one.nbytes:
            raise ValueError(f"a piece of {name} outside of {file.name}")
        dimensions = len(index.model[name][0]) if name in index.model else 1
        if not one.piece.order.is_natural and one.piece.order.dim >= dimensions:
            raise ValueError(f"the order of {name}")


def stored_file(name: str, nbytes: int, header: int, digest: str) -> StoredFile:
    return StoredFile(plain_name(name), count(nbytes), count(header), text(digest))


def process_file(rank: int, replica: int, name: str, digest: str) -> ProcessFile:
    return ProcessFile(count(rank), count(replica), plain_name(name), text(digest))


def stored_piece(
    name: str, kind: str, state: str, first: int, order: list[int],
    dtype: str, shape: list[int], file: str, start: int, digest: str,
) -> StoredPiece:  # fmt: skip
    sizes, (dim, blocks, ways) = tuple(map(count, shape)), map(count, order)
    if kind not in (PARAMETER, WHOLE, NUMBER) or (kind == NUMBER and prod(sizes) != 1):
        raise ValueError(f"a piece of {text(name)}")
    if not isinstance(getattr(torch, dtype), torch.dtype) or not blocks or not ways:
        raise ValueError(f"the type or order of {text(name)}")
    piece = Piece(text(name), kind, text(state), count(first), ElementOrder(dim, blocks, ways))
    return StoredPiece(piece, dtype, sizes, plain_name(file), count(start), text(digest))
