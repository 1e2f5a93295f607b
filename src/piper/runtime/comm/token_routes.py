"""How rows are sorted on their way to experts and back.

A route is two matrices [devices, experts of a device]: how many rows this device sends to each
expert of each device, and how many it gets from each device for each of its own experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def by_device(counts: torch.Tensor, devices: int) -> torch.Tensor:
    """Experts in a row: the first ones are on the first device."""
    return counts.reshape(devices, -1).to("cpu", torch.int64)


def totals(matrix: torch.Tensor) -> list[int]:
    """Rows that go to, or come from, each device."""
    return matrix.sum(1).tolist()


def by_expert(rows: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Rows as they arrived, device by device, now expert by expert.

    >>> by_expert(torch.tensor([1, 2, 3, 4]), torch.tensor([[1, 1], [2, 0]])).tolist()
    [1, 3, 4, 2]
    """
    return transposed(rows, got)


def by_source(rows: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """The other way round.

    >>> by_source(torch.tensor([1, 3, 4, 2]), torch.tensor([[1, 1], [2, 0]])).tolist()
    [1, 2, 3, 4]
    """
    return transposed(rows, got.t())


def transposed(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Parts that lie row by row of the matrix of their lengths, now column by column."""
    high, wide = matrix.shape
    if high == 1 or wide == 1:
        return rows
    parts = rows.split(matrix.flatten().tolist())
    order = [r * wide + c for c in range(wide) for r in range(high)]
    return torch.cat([parts[k] for k in order])


def local_counts(got: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """How many rows each expert here has."""
    return got.sum(0).to(like.device, like.dtype)


def pieces_for(rows: torch.Tensor, matrix: torch.Tensor, member: int) -> torch.Tensor:
    """Of what a device sends, what is for one member of the group."""
    return rows.split(totals(matrix))[member]


def gathered(brought: Sequence[tuple[torch.Tensor, torch.Tensor]], member: int) -> torch.Tensor:
    """What all members have for one of them, in their order."""
    return torch.cat([pieces_for(rows, matrix, member) for rows, matrix in brought])


def refuse_uncounted(counts: torch.Tensor, rows: torch.Tensor) -> None:
    counted = int(counts.sum())
    if counted != rows.shape[0]:
        raise ValueError(
            f"the experts' counts add up to {counted}, but there are {rows.shape[0]} rows: every "
            "row must be counted for one expert (leave dropped tokens out of the rows)"
        )
