"""How far apart the clocks of the processes are, found by asking the first one for the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Clock = Callable[[], int]  # nanoseconds since a moment that is this host's own

ROUNDS = 24  # questions of each process


@dataclass(frozen=True, slots=True)
class Offset:
    """What to add to this process's clock to have the first one's, and how sure that is."""

    nanoseconds: int = 0
    doubt: int = 0  # it is wrong by at most this


def offset_to_first(clock: Clock = time.perf_counter_ns) -> Offset:
    """Of this process's clock. All processes must call it, with nothing else under way.

    An answer was given after its question was asked and before it came back: each bounds the offset
    from both sides. Of all of them the closest bounds count, so that on a busy host the quickest
    way there and the quickest way back need not have been of one question.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Offset()
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            answer(peer, clock)
        return Offset()
    bounds = [ask(clock) for _ in range(ROUNDS)]
    least, most = max(low for low, _ in bounds), min(high for _, high in bounds)
    return Offset((least + most) // 2, (most - least + 1) // 2)


def answer(peer: int, clock: Clock) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        dist.recv(message, peer)
        message[0] = clock()
        dist.send(message, peer)


def ask(clock: Clock) -> tuple[int, int]:
    """The offset is between these."""
    message = torch.zeros(1, dtype=torch.int64)
    left = clock()
    dist.send(message, 0)
    dist.recv(message, 0)
    back, there = clock(), int(message.item())
    return there - back, there - left
