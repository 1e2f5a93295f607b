"""Text from the first process to the others, over the CPU's links whatever else there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from piper.errors import PeerLost

FIRST = 0


def tell(text: str = "") -> str:
    """The same for everyone: the first process says it, the others call this to be told."""
    with symptoms():
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, FIRST)
        content = bytearray(text.encode()) or bytearray(int(size))
        dist.broadcast(on_the_cpu(content), FIRST)
    return content.decode()


def send(texts: Mapping[int, str]) -> None:
    """To each of the others what is its own; they `receive` it."""
    with symptoms():
        for rank, text in texts.items():
            content = bytearray(text.encode())
            dist.send(torch.tensor([len(content)]), rank)
            dist.send(on_the_cpu(content), rank)


def receive() -> str:
    """What the first process sends to this one."""
    with symptoms():
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, FIRST)
        content = bytearray(int(size))
        dist.recv(on_the_cpu(content), FIRST)
    return content.decode()


@contextmanager
def symptoms() -> Iterator[None]:
    """A peer that is lost meanwhile is not the failure of this one."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(dist.get_rank(), "the sending of plans", str(error)) from error


def on_the_cpu(content: bytearray) -> torch.Tensor:
    """The same memory: where there are GPUs, objects of torch may choose another way."""
    return torch.frombuffer(content, dtype=torch.uint8)
