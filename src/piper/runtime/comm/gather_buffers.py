"""Gather buffers, and the part of one that a gather fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from piper.names import Device
from piper.plan.buffer_layout import offsets
from piper.plan.instructions import Gather
from piper.runtime.comm.flat_messages import message_views, unpacked, whole_shapes
from piper.runtime.comm.gloo import Comm
from piper.runtime.comm.in_flight import Arrived
from piper.runtime.torch_private import foreach_copy_

Tensors = tuple[torch.Tensor, ...]


class GatherBuffer:
    """Memory that gathers fill. It exists from a gather until its result is freed.

    Views of it stay valid: they share a storage, which shrinks to nothing in between.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.release()

    def views(self, gather: Gather, device: Device) -> GatherViews:
        """What a gather fills. Views are made while there is memory: torch looks at its size."""
        self.hold(gathered_bytes(gather))
        found = GatherViews.of(self.flat, gather, device)
        self.release()
        return found

    def hold(self, size: int) -> None:
        if self.flat.untyped_storage().nbytes() < size:
            self.flat.untyped_storage().resize_(size)

    def release(self) -> None:
        self.flat.untyped_storage().resize_(0)


@dataclass(frozen=True, slots=True)
class GatherViews:
    """Views of a gather buffer: its messages, this device's shards of them, whole parameters."""

    messages: Tensors
    own: Tensors
    parameters: Tensors

    @staticmethod
    def of(buffer: torch.Tensor, gather: Gather, device: Device) -> GatherViews:
        flats = message_views(buffer, gather.messages)
        ways, mine = len(gather.group), gather.group.index(device)
        own = tuple(flat.view(ways, -1)[mine] for flat in flats)
        whole = unpacked(flats, gather.messages, whole_shapes(gather.shapes))
        return GatherViews(tuple(flats), own, whole)

    def fill(self, comm: Comm, shards: Sequence[torch.Tensor], gather: Gather) -> Arrived:
        """Start to gather. Messages bring the parameters."""
        pairs, where = self.sent(shards), (gather.stream, gather.group)
        works = [comm.all_gather(flat, shard, *where) for flat, shard in pairs]
        return Arrived(works, self.parameters)

    def sent(self, shards: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each message with the shard that is sent. Masters are rounded to where they arrive."""
        pairs = list(zip(self.own, shards, strict=True))
        finer = [(own, shard) for own, shard in pairs if own.dtype != shard.dtype]
        if finer:
            foreach_copy_([own for own, _ in finer], [shard for _, shard in finer])
        for whole, (own, shard) in zip(self.messages, pairs, strict=True):
            yield whole, own if own.dtype != shard.dtype else shard


def gathered_bytes(gather: Gather) -> int:
    return offsets(gather.messages)[-1]
