"""Parameters that a new strategy does not use yet, kept in the memory of every process."""

from __future__ import annotations

from pathlib import Path

import torch

from piper.runtime.checkpoint.index import Index, StoredPiece
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.pieces import Pieces, Turns, saved_pieces
from piper.runtime.checkpoint.reader import Cache, Reader
from piper.runtime.checkpoint.writer import type_name
from piper.runtime.state.device_state import DeviceState


class HeldPieces(Reader):
    """They fill buckets that are made later, as a checkpoint does."""

    def __init__(self, pieces: Pieces) -> None:
        self.tensors = {number: tensor for number, (_, tensor) in enumerate(pieces)}
        stored = tuple(
            StoredPiece(piece, type_name(tensor.dtype), tuple(tensor.shape), "", number, "")
            for number, (piece, tensor) in enumerate(pieces)
        )
        super().__init__(Path(), Index(0, "", 1, {}, (), (), (), stored, ()))

    def tensor(self, one: StoredPiece, cache: Cache) -> torch.Tensor:
        return self.tensors[one.start]


def keep_unused(
    peers: Peers, before: DeviceState, turns: Turns, after: DeviceState, used: set[str]
) -> None:
    """Parameters that the old state has, or its checkpoint, and no bucket of the new one."""
    mine = [(p, t.cpu()) for p, t in saved_pieces(before, turns) if p.name not in used]
    found = [pair for pairs in peers.everyone(mine) for pair in pairs]
    if before.origin is not None:
        names = {piece.name for piece, _ in found}
        found += before.origin.pieces(set(before.origin.known) - used - names)
    if found:
        after.origin = HeldPieces(found)
