"""How a token all-to-all sorts rows: dispatch to experts, and combine back to their devices.

A route is two matrices [devices, experts per device]: `sent`, the rows that this device sends to
each expert of each device, and `got`, the rows that it gets from each device for each of its own
experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def by_device(counts: torch.Tensor, devices: int) -> torch.Tensor:
    """Counts as [devices, experts per device]. The first experts are on the first device."""
    return counts.reshape(devices, -1).to("cpu", torch.int64)


def totals(matrix: torch.Tensor) -> list[int]:
    """The number of rows to or from each device."""
    return matrix.sum(1).tolist()


def by_expert(rows: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Sort rows that arrived device by device, so that they lie expert by expert.

    >>> by_expert(torch.tensor([1, 2, 3, 4]), torch.tensor([[1, 1], [2, 0]])).tolist()
    [1, 3, 4, 2]
    """
    return transposed(rows, got)


def by_source(rows: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """The inverse of `by_expert`.

    >>> by_source(torch.tensor([1, 3, 4, 2]), torch.tensor([[1, 1], [2, 0]])).tolist()
    [1, 2, 3, 4]
    """
    return transposed(rows, got.t())


def transposed(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Reorder parts from row-major to column-major. `matrix` holds their lengths."""
    high, wide = matrix.shape
    if high == 1 or wide == 1:
        return rows
    parts = rows.split(matrix.flatten().tolist())
    order = [r * wide + c for c in range(wide) for r in range(high)]
    return torch.cat([parts[k] for k in order])


def expert_by_expert(parts: Sequence[torch.Tensor], got: torch.Tensor) -> list[torch.Tensor]:
    """Rows of each device, cut so that those of the first expert come first.

    >>> [one.tolist() for one in expert_by_expert(
    ...     [torch.tensor([1, 2]), torch.tensor([3, 4])], torch.tensor([[1, 1], [2, 0]]))]
    [[1], [3, 4], [2], []]
    """
    cut = [part.split(counts) for part, counts in zip(parts, got.tolist(), strict=True)]
    return [one for expert in zip(*cut, strict=True) for one in expert]


def local_counts(got: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The number of rows for each expert of this device."""
    return got.sum(0).to(like.device, like.dtype)


def pieces_for(rows: torch.Tensor, matrix: torch.Tensor, member: int) -> torch.Tensor:
    """The rows that a device sends to one member of the group."""
    return rows.split(totals(matrix))[member]


def gathered(brought: Sequence[tuple[torch.Tensor, torch.Tensor]], member: int) -> torch.Tensor:
    """The rows that all members send to one of them, in the order of members."""
    return torch.cat([pieces_for(rows, matrix, member) for rows, matrix in brought])


def refuse_uncounted(counts: torch.Tensor, rows: torch.Tensor) -> None:
    counted = int(counts.sum())
    if counted != rows.shape[0]:
        raise ValueError(
            f"the experts' counts add up to {counted}, but there are {rows.shape[0]} rows: every "
            "row must be counted for one expert (leave dropped tokens out of the rows)"
        )
