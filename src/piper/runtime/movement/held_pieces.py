"""Parameters that a new strategy does not use yet, kept in the memory of every process."""

from __future__ import annotations

from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.pieces import Turns, saved_pieces
from piper.runtime.checkpoint.reader import HeldPieces
from piper.runtime.state.device_state import DeviceState


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
