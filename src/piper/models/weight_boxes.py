"""Tensors that are stacked, joined or cut, without their values: where each element comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from piper.errors import InputError

Shape = tuple[int, ...]
Run = tuple[int, int, str, int]  # start in the tensor, length, source, start in the source


@dataclass(frozen=True)
class Box:
    """A box of a tensor whose elements lie in one tensor of a file."""

    source: str
    start: Shape
    shape: Shape
    offset: int  # of its first element, in the source
    strides: Shape  # in the source

    def moved(self, dim: int, by: int) -> Box:
        start = (*self.start[:dim], self.start[dim] + by, *self.start[dim + 1 :])
        return replace(self, start=start)

    def cut(self, dim: int, low: int, high: int) -> Box:
        """What lies between two positions of a dimension. It may be empty."""
        first = max(low, self.start[dim])
        size = max(0, min(high, self.start[dim] + self.shape[dim]) - first)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        skipped = first - self.start[dim]
        offset = self.offset + skipped * self.strides[dim]
        return replace(self.moved(dim, skipped), shape=shape, offset=offset)


@dataclass(frozen=True)
class Boxed:
    """A tensor that is made of boxes."""

    shape: Shape
    boxes: tuple[Box, ...]

    def runs(self) -> list[Run]:
        """Elements that are contiguous here and in their source; by where they start."""
        return sorted(run for box in self.boxes for run in runs_of(box, self.shape))


def of_file(name: str, shape: Shape) -> Boxed:
    return Boxed(shape, (Box(name, (0,) * len(shape), shape, 0, row_major(shape)),))


def row_major(shape: Shape) -> Shape:
    """
    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def stacked(tensors: Sequence[Boxed], dim: int) -> Boxed:
    """Along a new dimension."""
    return joined([unsqueezed(one, dim) for one in tensors], dim)


def unsqueezed(one: Boxed, dim: int) -> Boxed:
    def put(sizes: Shape, value: int) -> Shape:
        return (*sizes[:dim], value, *sizes[dim:])

    boxes = (
        replace(b, start=put(b.start, 0), shape=put(b.shape, 1), strides=put(b.strides, 0))
        for b in one.boxes
    )
    return Boxed(put(one.shape, 1), tuple(boxes))


def joined(tensors: Sequence[Boxed], dim: int) -> Boxed:
    """Along a dimension that they have."""
    rest = {(*one.shape[:dim], *one.shape[dim + 1 :]) for one in tensors}
    if len(rest) != 1:
        shapes = " and ".join(str(list(one.shape)) for one in (tensors[0], tensors[-1]))
        sources = " and ".join(one.boxes[0].source for one in (tensors[0], tensors[-1]))
        what = f"{sources} are parts of one tensor, and do not fit together: {shapes}"
        raise InputError.of("from_pretrained", what, "give the files of one model")
    at, boxes = 0, list[Box]()
    for one in tensors:
        boxes += [box.moved(dim, at) for box in one.boxes]
        at += one.shape[dim]
    shape = tensors[0].shape
    return Boxed((*shape[:dim], at, *shape[dim + 1 :]), tuple(boxes))


def divided(one: Boxed, parts: int, dim: int) -> list[Boxed]:
    """In parts of the same size."""
    size = one.shape[dim] // parts
    shape = (*one.shape[:dim], size, *one.shape[dim + 1 :])
    found = []
    for low in range(0, size * parts, size):
        boxes = (box.cut(dim, low, low + size).moved(dim, -low) for box in one.boxes)
        found.append(Boxed(shape, tuple(box for box in boxes if prod(box.shape))))
    return found


def runs_of(box: Box, shape: Shape) -> Iterator[Run]:
    walked, strides = walked_dims(box, shape), row_major(shape)
    length = prod(box.shape[walked:])
    first = sum(at * by for at, by in zip(box.start, strides, strict=True))
    for index in product(*map(range, box.shape[:walked])):
        here = sum(at * by for at, by in zip(index, strides, strict=False))
        there = sum(at * by for at, by in zip(index, box.strides, strict=False))
        if length:
            yield first + here, length, box.source, box.offset + there


def walked_dims(box: Box, shape: Shape) -> int:
    """The outer dimensions: in those after them, elements are contiguous here and there."""
    length = 1
    for dim in reversed(range(len(shape))):
        if box.shape[dim] != 1 and box.strides[dim] != length:
            return dim + 1
        length *= box.shape[dim]
        if box.shape[dim] != shape[dim]:
            return dim
    return 0
