"""The offsets between the clocks of the processes, measured with messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Clock = Callable[[], int]  # nanoseconds since a moment that differs by host

ROUNDS = 24  # messages of each process


@dataclass(frozen=True, slots=True)
class Offset:
    """What to add to this process's clock to get the first one's, and its error."""

    nanoseconds: int = 0
    doubt: int = 0  # the largest possible error


def offset_to_first(clock: Clock = time.perf_counter_ns) -> Offset:
    """The offset of this process's clock. All processes must call it, with no message in flight.

    The first process reads its clock after a request left and before the answer arrived, so each
    round trip bounds the offset from both sides. The tightest bounds of all round trips count. On
    a busy host, the fastest way there and the fastest way back may be of different round trips.
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
    """Lower and upper bound of the offset, from one round trip."""
    message = torch.zeros(1, dtype=torch.int64)
    left = clock()
    dist.send(message, 0)
    dist.recv(message, 0)
    back, there = clock(), int(message.item())
    return there - back, there - left
