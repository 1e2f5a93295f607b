"""Files in the safetensors format: a JSON header, then the bytes of tensors. They run no code."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from piper.errors import InputError
from piper.runtime.checkpoint.format.strict_values import WRONG, count, parsed_json

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in NAMES.items()}
METADATA = "__metadata__"
LENGTH = 8  # bytes that say how long the header is
LONGEST = 100_000_000  # bytes of a header, as the format has it


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its type, its shape, and where its bytes begin in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its tensors. `data` is where their bytes begin."""

    entries: Mapping[str, Entry]
    data: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The length of the whole file."""
        return max((one.start + one.nbytes for one in self.entries.values()), default=self.data)


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[Header, bytes]:
    """The header of a file with these tensors, and its bytes. Wide types come first: aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    rows, at = dict[str, Any](), 0
    for name in order:
        dtype, shape = tensors[name]
        end = at + prod(shape) * dtype.itemsize
        rows[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    extra = {METADATA: dict(metadata)} if metadata else {}
    text = json.dumps({**extra, **rows}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH)
    content = len(text).to_bytes(LENGTH, "little") + text
    entries = {
        name: Entry(tensors[name][0], tuple(tensors[name][1]), len(content) + offset)
        for name, row in rows.items()
        for offset in row["data_offsets"][:1]
    }
    return Header(entries, len(content), dict(metadata)), content


def read_header(path: Path) -> Header:
    """The header of a file, checked: nothing in it may point outside the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if size < LENGTH or not 2 <= length <= min(LONGEST, size - LENGTH):
            raise damaged(path, "it is not a safetensors file")
        text = file.read(length)
    try:
        return parsed(parsed_json(text), LENGTH + length, size)
    except WRONG as error:
        raise damaged(path, f"its header is damaged ({str(error)[:80]})") from None


def parsed(found: Mapping[str, Any], data: int, size: int) -> Header:
    entries = {}
    metadata = {str(k): str(v) for k, v in found.get(METADATA, {}).items()}
    for name, row in found.items():
        if name == METADATA:
            continue
        start, end = map(count, row["data_offsets"])
        entry = Entry(TYPES[row["dtype"]], tuple(map(count, row["shape"])), data + start)
        if end - start != entry.nbytes or data + end > size:
            raise ValueError(f"{name} is not as long as its shape")
        entries[name] = entry
    return Header(entries, data, metadata)


def damaged(path: Path, what: str) -> InputError:
    return InputError.of(
        "checkpoint", f"{path}: {what}", "get the file again from where it is from"
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. The tensor must live as long."""
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())).cast("B")


def tensor_of(content: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on this memory."""
    if not content:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(tuple(shape))


def slices(content: memoryview, size: int) -> Iterator[memoryview]:
    return (content[at : at + size] for at in range(0, len(content), size))
