"""The part of a gather buffer that one gather fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from piper.names import Device
from piper.plan.instructions import Gather
from piper.runtime.comm.flat_messages import message_views, unpacked, whole_shapes
from piper.runtime.torch_private import foreach_copy_

Tensors = tuple[torch.Tensor, ...]


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

    def sent(self, shards: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each message with the shard that is sent. Masters are rounded to where they arrive."""
        pairs = list(zip(self.own, shards, strict=True))
        finer = [(own, shard) for own, shard in pairs if own.dtype != shard.dtype]
        if finer:
            foreach_copy_([own for own, _ in finer], [shard for _, shard in finer])
        for whole, (own, shard) in zip(self.messages, pairs, strict=True):
            yield whole, own if own.dtype != shard.dtype else shard
