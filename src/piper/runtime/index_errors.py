"""Indices out of range: which tensor they point into, and what the batch has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from piper.runtime.torch_private import last_call

IDS = (
    "token ids and labels count from 0, and must be less than the rows of the embedding, or the "
    "classes of the loss: is the tokenizer that of the model? Ignored labels are -100"
)
POSITIONS = "Rows of tokens must not be longer than the model has positions"
LENGTH = "truncate the rows in the tokenizer"
ROWS = (
    "If they are numbers of rows of the batch, use one microbatch and one replica: others have "
    "fewer rows"
)
MORE = "or make the model with more positions (n_positions, max_position_embeddings)"
BEYOND = re.compile(r"out of (bounds|range)")
EMBEDDING = "aten.embedding.default"
Named = Sequence[tuple[str, torch.Tensor]]  # tensors of the batch, as the region reads them


@dataclass(frozen=True, slots=True)
class Lookup:
    """The call of an embedding that failed."""

    rows: int  # of the embedding
    indices: torch.Tensor

    def __str__(self) -> str:
        low, high = span_of(self.indices)
        return f"an embedding of {self.rows} rows was asked for rows {low} to {high}"


def has_wrong_index(error: Exception) -> bool:
    """Some functions of torch have an error of their own for it."""
    own = isinstance(error, RuntimeError) and BEYOND.search(str(error))
    return isinstance(error, IndexError) or bool(own)


def index_text(error: Exception, batch: Named) -> str:
    """What the batch has, and what to write. Empty if nothing is known of the integers."""
    found, lookup = "; ".join(integers(batch)), lookup_of(error)
    length = None if lookup is None else length_of(lookup, batch)
    if lookup is not None and length is not None:
        most = length - (span_of(lookup.indices)[1] + 1 - lookup.rows)
        what = f"{lookup}, one for each of the {length} positions of a row; {found}"
        return f"{what}\n  fix: {LENGTH}, here to {most} tokens, {MORE}"
    if not found and lookup is None:
        return ""
    said = "; ".join(text for text in (str(lookup or ""), found) if text)
    return f"{said}\n  fix: {IDS}. {POSITIONS}. {ROWS}"


def integers(batch: Named) -> Iterator[str]:
    """The integers of the batch that a region reads: one of them may be too large."""
    for name, tensor in batch:
        if is_index(tensor):
            yield f"{name} {list(tensor.shape)} has {span(tensor)} here"


def lookup_of(error: Exception) -> Lookup | None:
    call = last_call(error)
    if call is None or str(call[0]) != EMBEDDING:
        return None
    table, indices, *_ = call[1]
    return Lookup(len(table), indices) if is_index(indices) else None


def length_of(lookup: Lookup, batch: Named) -> int | None:
    """The length of a row, if the embedding is one of positions. None: it is of ids."""
    if any(one.shape == lookup.indices.shape and one.equal(lookup.indices) for _, one in batch):
        return None
    length = lookup.indices.shape[-1] if lookup.indices.dim() else 0
    low, high = span_of(lookup.indices)
    counted = high - low < length <= high + 1  # as many numbers as there are positions
    known = {one.shape[1] for _, one in batch if one.dim() > 1}
    return length if counted and length in known else None


def is_index(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.dtype in (torch.int32, torch.int64)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.min()), int(tensor.max())


def span(tensor: torch.Tensor) -> str:
    """
    >>> span(torch.tensor([3, 1]))
    'integers from 1 to 3'
    """
    return "integers from {} to {}".format(*span_of(tensor))
