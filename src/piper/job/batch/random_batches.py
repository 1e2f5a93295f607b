"""Random batches like the example of a script, and their microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from piper.job.batch.batch import Batch

Draw = Callable[[torch.Tensor, tuple[int, ...], torch.Generator], torch.Tensor]


def like(example: Batch, rows: int, generator: torch.Generator) -> Batch:
    """A random batch of all replicas together, shaped and typed like the example of one."""
    return _like(example, rows, generator, drawn)


def like_columns(example: Batch, rows: int, generator: torch.Generator) -> Batch:
    """The same, with integers of each column from its own range, as those of a table are."""
    return _like(example, rows, generator, drawn_in_columns)


def rows_of(example: Batch, rows: int, generator: torch.Generator) -> Batch:
    """Rows of the example itself, at random: all that belongs to a row stays together."""
    picked = torch.randint(example.rows or 1, (rows,), generator=generator)
    return example.map(lambda tensor: tensor.detach().cpu()).change_rows(lambda one: one[picked])


def _like(example: Batch, rows: int, generator: torch.Generator, draw: Draw) -> Batch:
    def made(leaf: torch.Tensor) -> torch.Tensor:
        return draw(leaf.detach().cpu(), (rows, *leaf.shape[1:]), generator)

    return example.change_rows(made).map(lambda tensor: tensor.cpu())


def drawn_in_columns(
    seen: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """
    >>> table, draw = torch.tensor([[0, 7], [1, 9]]), torch.Generator().manual_seed(0)
    >>> made = drawn_in_columns(table, (50, 2), draw)
    >>> made.amin(0).tolist(), made.amax(0).tolist()
    ([0, 7], [1, 9])
    """
    integers = not seen.is_floating_point() and not seen.is_complex() and seen.dtype != torch.bool
    if not integers or seen.dim() < 2 or not seen.numel():
        return drawn(seen, shape, generator)
    low, high = seen.amin(0), seen.amax(0)
    if low.min() < 0:  # ignored labels
        return seen.gather(0, torch.randint(len(seen), shape, generator=generator))
    part = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low + part * (high - low + 1)).to(seen.dtype)


def drawn(seen: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random values like those seen. Integers stay in the range of the example, and so in every
    vocabulary. Negative integers (ignored labels) and other types are drawn from the example."""
    if not seen.numel():
        return seen.new_zeros(shape)
    if seen.is_complex():
        return torch.complex(*(drawn(one, shape, generator) for one in (seen.real, seen.imag)))
    low, high = seen.min(), seen.max()
    if seen.is_floating_point() and low == high:
        return torch.randn(shape, generator=generator).to(seen.dtype)
    if not seen.is_floating_point() and seen.dtype != torch.bool and low >= 0:
        return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(seen.dtype)
    picked = torch.randint(seen.numel(), shape, generator=generator)
    return seen.flatten()[picked]


def constant_inputs(example: Batch, names: Sequence[str]) -> list[str]:
    flat = [
        name
        for name, leaf in zip(names, example.tensors, strict=True)
        if leaf.dim() and leaf.numel() and not leaf.is_floating_point() and is_constant(leaf)
    ]
    if not flat:
        return []
    which = " and ".join(flat)
    return [
        f"in the example, {which} has one value everywhere, and so has the data drawn like it: "
        "microbatches and replicas then differ less; give an example with real data"
    ]


def is_constant(leaf: torch.Tensor) -> bool:
    return bool((leaf == leaf.flatten()[0]).all())


def doubled(batch: Batch) -> Batch:
    return batch.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def chunk(batch: Batch, part: int, parts: int) -> Batch:
    """A microbatch, split as plain PyTorch does."""
    return batch.change_rows(lambda tensor: tensor.chunk(parts)[part])


def microbatches(batch: Batch, parts: int, sizes: Sequence[Sequence[int]]) -> list[Batch]:
    """All microbatches of all replicas, split as plain PyTorch does.

    `sizes`: those of each replica, in turn. Empty: all are equal.
    """
    if not sizes:
        return [chunk(batch, k, parts) for k in range(parts)]
    every = [rows for own in sizes for rows in own]
    every *= parts // len(every)
    return [part_of_sizes(batch, part, every) for part in range(parts)]


def part_of_sizes(batch: Batch, part: int, sizes: list[int]) -> Batch:
    return batch.change_rows(lambda tensor: tensor.split(sizes)[part])
