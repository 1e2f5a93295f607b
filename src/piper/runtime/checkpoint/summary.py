"""What a checkpoint contains, in words; and whether all of it is as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from piper.names import amount
from piper.runtime.checkpoint.description import tensor_text
from piper.runtime.checkpoint.folder import current, kept_in
from piper.runtime.checkpoint.index import Index
from piper.runtime.checkpoint.pieces import EMA
from piper.runtime.checkpoint.reader import Reader
from piper.runtime.checkpoint.resume import reader_of, values_of


def summary(folder: Path) -> Iterator[str]:
    """Lines about the checkpoint that `resume` would take, and the others of the run."""
    index = reader_of(folder).index
    others = [one.folder for one in kept_in(folder)][:-1] if current(folder) != folder else []
    yield f"{current(folder).name}: {amount(index.steps, 'step')}, saved {index.saved}"
    yield f"  model      {model_text(index)}"
    yield f"  optimizer  {' and '.join(index.optimizers) or 'none'}{options_text(index)}"
    if any(one.piece.state == EMA for one in index.pieces):
        yield "  averages   of the weights (ema)"
    files, writers = amount(len(index.files), "file"), len(index.processes)
    by = amount(writers, "process", "processes")
    yield f"  files      {files}, {size_text(index.nbytes)}, written by {by}"
    yield f"  batches    for {amount(index.replicas, 'replica')}"
    if others:
        yield f"other checkpoints: {', '.join(others)}"


def tensor_lines(folder: Path) -> Iterator[str]:
    """One line for each tensor of the model."""
    for name, tensor in reader_of(folder).index.model.items():
        yield f"  {name}  {tensor_text(tensor)}"


def model_text(index: Index) -> str:
    count = sum(prod(shape) for shape, _ in index.model.values())
    return f"{amount(len(index.model), 'tensor')}, {count:,} elements, buffers included"


def options_text(index: Index) -> str:
    shown = [f"{name}={value}" for name, value in index.options if value != "None"]
    return f" (defaults: {', '.join(shown)})" if shown else ""


def size_text(nbytes: int) -> str:
    """
    >>> size_text(1536), size_text(3 << 30)
    ('1.5 KiB', '3.0 GiB')
    """
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "bytes" else f"{nbytes} bytes"


def verified(folder: Path) -> int:
    """Read everything and compare it with its digest. Returns the number of pieces."""
    reader: Reader = reader_of(folder)
    for file in reader.index.files:
        reader.check_header(file)
    for one in reader.index.pieces:
        reader.tensor(one, {})
    for process in reader.index.processes:
        values_of(reader, process)
    return len(reader.index.pieces)
