"""Text from the first process to the others. It always travels over the CPU's links."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from piper.runtime.processes.waits import peers_needed

FIRST = 0
SENDING = "the sending of plans"


def broadcast_text(text: str = "") -> str:
    """The first process passes its text; the others pass nothing. All return the same text."""
    with peers_needed(SENDING, None if text else (FIRST,)):
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, FIRST)
        content = bytearray(text.encode()) or bytearray(int(size))
        dist.broadcast(on_the_cpu(content), FIRST)
    return content.decode()


def relay_text(text: str, ranks: Sequence[int]) -> str:
    """The first of these ranks has a text, and all of them return it.

    Each rank passes it on to two others at most, so that no process sends it to everyone.
    """
    here = ranks.index(dist.get_rank())
    with peers_needed(SENDING, ranks):
        content = bytearray(text.encode()) if here == 0 else received(ranks[(here - 1) // 2])
        for rank in ranks[2 * here + 1 : 2 * here + 3]:
            dist.send(torch.tensor([len(content)]), rank)
            dist.send(on_the_cpu(content), rank)
    return content.decode()


def received(rank: int) -> bytearray:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank)
    content = bytearray(int(size))
    dist.recv(on_the_cpu(content), rank)
    return content


def on_the_cpu(content: bytearray) -> torch.Tensor:
    """A CPU tensor on the same memory. torch may send Python objects through a GPU."""
    return torch.frombuffer(content, dtype=torch.uint8)
