"""Writing what one process has of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from piper.runtime.checkpoint.copies import HostMemory
from piper.runtime.checkpoint.format.files import SLICE, digest_of, write_new
from piper.runtime.checkpoint.format.safetensors_format import NAMES, bytes_of, header_of, slices
from piper.runtime.checkpoint.format.sealed_json import sealed
from piper.runtime.checkpoint.index import ProcessFile, StoredFile, StoredPiece
from piper.runtime.checkpoint.pieces import Pieces

Written = tuple[list[StoredFile], list[StoredPiece]]


def write_pieces(folder: Path, rank: int, pieces: Pieces) -> Written:
    """One file, with all pieces. Types that the format does not know are bytes in it."""
    if not pieces:
        return [], []
    tensors = {key(k, piece): stored(tensor) for k, (piece, tensor) in enumerate(pieces)}
    host = HostMemory()
    shapes = {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}
    header, content = header_of(shapes, {"format": "pt"})
    name, digests = f"{rank}.safetensors", dict[str, str]()

    def parts() -> Iterator[memoryview]:
        yield memoryview(content)
        for one in header.entries:
            total = hashlib.sha256()
            for part in slices(bytes_of(host.of(tensors[one])), SLICE):
                total.update(part)
                yield part
            digests[one] = total.hexdigest()

    size = write_new(folder / name, parts())
    rows = [
        StoredPiece(
            piece, type_name(tensor.dtype), tuple(tensor.shape), name,
            header.entries[key(k, piece)].start, digests[key(k, piece)],
        )
        for k, (piece, tensor) in enumerate(pieces)
    ]  # fmt: skip
    return [StoredFile(name, size, len(content), digest_of(content))], rows


def key(number: int, piece: object) -> str:
    """Unique in its file: states of the optimizer may be called anything."""
    return f"{piece}#{number}"


def stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in NAMES else tensor.contiguous().view(-1).view(torch.uint8)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_process(folder: Path, rank: int, replica: int, values: Mapping[str, Any]) -> ProcessFile:
    name, content = f"{rank}.json", sealed(dict(values))
    write_new(folder / name, [memoryview(content)])
    return ProcessFile(rank, replica, name, digest_of(content))
