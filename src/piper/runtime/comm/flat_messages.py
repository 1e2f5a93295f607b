"""Bundles as flat messages, and the pieces of parameters that a shard holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from piper.plan.buffer_layout import offsets
from piper.plan.instructions import Layout, Shape


def packed(tensors: list[torch.Tensor | None], message: Layout) -> torch.Tensor:
    """The message's tensors, one after the other. Each is freed as soon as it is copied.

    A tensor that fills a message on its own is not copied.
    """
    _, chosen, padded = message
    parts = [take(tensors, k).view(-1) for k in chosen]
    missing = padded - sum(part.numel() for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def take(tensors: list[torch.Tensor | None], k: int) -> torch.Tensor:
    tensor, tensors[k] = tensors[k], None
    assert tensor is not None
    return tensor


def unpacked(
    flats: Sequence[torch.Tensor], messages: Sequence[Layout], shapes: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, ...]:
    """Views of the flat messages in these shapes, in the order of the bundle."""
    found: dict[int, torch.Tensor] = {}
    for flat, (_, chosen, _) in zip(flats, messages, strict=True):
        first = 0
        for k in chosen:
            size = torch.Size(shapes[k]).numel()
            found[k] = flat[first : first + size].view(tuple(shapes[k]))
            first += size
    return tuple(found[k] for k in sorted(found))


def message_views(buffer: torch.Tensor, messages: Sequence[Layout]) -> list[torch.Tensor]:
    """The messages of a gather, as views of its buffer."""
    firsts = offsets(messages)
    views = []
    for first, (dtype, _, padded) in zip(firsts, messages, strict=False):
        kind = getattr(torch, dtype)
        views.append(buffer[first : first + padded * kind.itemsize].view(kind))
    return views


def whole_shapes(shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
    return [tuple(size or 0 for size in sizes) for sizes, _ in shapes]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of a tensor of the bundle, at `first` in a message's shard."""

    tensor: int
    start: int
    stop: int
    message: int
    first: int

    def of(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return shards[self.message].narrow(0, self.first, self.stop - self.start)


def pieces(
    messages: Sequence[Layout], numels: Sequence[int], shard: int, ways: int
) -> Iterator[Piece]:
    """The pieces in one of `ways` shards. It may hold nothing of some tensors."""
    for number, (_, chosen, padded) in enumerate(messages):
        size = padded // ways
        low, begin = shard * size, 0
        for k in chosen:
            start, stop = max(low, begin), min(low + size, begin + numels[k])
            if start < stop:
                yield Piece(k, start - begin, stop - begin, number, start - low)
            begin += numels[k]
