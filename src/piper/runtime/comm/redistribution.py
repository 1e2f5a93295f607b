"""Collectives on one tensor, along its first dimension, for devices that divide a region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from piper.runtime.comm.gloo import Comm, Group, Handle, Shard


@dataclass(slots=True)
class Coming:
    """A message that brings a tensor."""

    wait_for_it: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        return self.wait_for_it()


def redistribute(comm: Comm, tensor: torch.Tensor, step: str, stream: str, group: Group) -> Shard:
    """Start it. The tensor stays as it is, because others may read it."""
    given = tensor.contiguous()
    match step:
        case "all-reduce":
            whole = given.clone()
            return filled(comm.all_reduce(whole.view(-1), stream, group), whole)
        case "all-gather":
            whole = resized(given, given.shape[0] * len(group))
            return filled(comm.all_gather(whole.view(-1), given.view(-1), stream, group), whole)
        case "reduce-scatter":
            shape = (given.shape[0] // len(group), *given.shape[1:])
            shard = comm.reduce_scatter(given.view(-1), stream, group)
            return Coming(lambda: shard.wait().view(shape))
        case "all-to-all":
            arrived = resized(given, given.shape[0])
            flat = arrived.view(-1), given.view(-1)
            return filled(comm.all_to_all_single(*flat, stream, group), arrived)
        case "shift" | "shift-back":
            arrived = resized(given, given.shape[0])
            flat = arrived.view(-1), given.view(-1)
            return filled(comm.shift(*flat, 1 if step == "shift" else -1, stream, group), arrived)
    raise AssertionError(f"{step} is not a message")


def filled(work: Handle, tensor: torch.Tensor) -> Coming:
    def wait() -> torch.Tensor:
        work.wait()
        return tensor

    return Coming(wait)


def resized(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]))


def sliced(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """One of equal slices of the first dimension, in its own memory."""
    size = tensor.shape[0] // parts
    return tensor.narrow(0, part * size, size).clone(memory_format=torch.contiguous_format)
