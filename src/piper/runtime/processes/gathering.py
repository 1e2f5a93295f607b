"""The values of all processes, on each of them or on the first. Reading them runs no code."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from piper.runtime.processes.waits import peers_needed
from piper.runtime.processes.wire_format import from_bytes, to_bytes

Found = TypeVar("Found")
FIRST = 0


def everyone(mine: Found, what: str, group: Any = None) -> list[Found]:
    """The value of each process. `what` it is for stands in the error if a process is missing."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    content = to_bytes(mine)
    with peers_needed(what):
        sizes = all_sizes(len(content), group)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(content)] = content
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=group)
    return [from_bytes(one[:size]) for one, size in zip(found, sizes, strict=True)]


def gather(mine: Found) -> list[Found] | None:
    """The value of each process, on the first one. The others get None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    first, content = dist.get_rank() == FIRST, to_bytes(mine)
    with peers_needed("the gathering of values", None if first else (FIRST,)):
        sizes = all_sizes(len(content))
        if not first:
            dist.send(content, FIRST)
            return None
        others = [received(rank, sizes[rank]) for rank in range(1, len(sizes))]
    return [from_bytes(one) for one in (content, *others)]


def received(rank: int, size: int) -> torch.Tensor:
    content = torch.empty(size, dtype=torch.uint8)
    dist.recv(content, rank)
    return content


def all_sizes(size: int, group: Any = None) -> list[int]:
    """The size that each process gives."""
    found = torch.zeros(dist.get_world_size(), 1, dtype=torch.int64)
    dist.all_gather([*found], torch.tensor([size]), group=group)
    return [int(one) for one in found]
