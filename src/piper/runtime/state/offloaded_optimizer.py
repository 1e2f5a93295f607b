"""Optimizer state that waits in host memory between updates, with the masters of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piper.plan.instructions import State
from piper.runtime.host_memory import Copying, HostMemory, Pages, host_memory
from piper.runtime.state import offloaded_parameters
from piper.runtime.state.assigned_parameters import refuse_aliases

Put = Callable[[torch.Tensor], None]
Place = tuple[torch.Tensor, Put]  # a tensor, and how another one takes its place


class Holder(Protocol):
    """A bucket with an optimizer."""

    optimizer: torch.optim.Optimizer | None
    copies: list[tuple[torch.Tensor, torch.nn.Parameter]]  # and their masters
    copying: Copying | None
    pages: Pages


class Placed(Holder, offloaded_parameters.Holder, Protocol):
    """The same with all that it holds."""

    optimizer_on_host: bool


@dataclass(slots=True)
class StateCopy:
    """Optimizer state on its way. When it is waited for, the optimizer uses the copy."""

    copy: Copying
    places: list[Put]

    def wait(self) -> None:
        for put, tensor in zip(self.places, self.copy.wait(), strict=True):
            put(tensor)


def store_state(bucket: Holder, memory: HostMemory, stream: str) -> StateCopy:
    """Start to copy all that the optimizer of a bucket keeps to where it was before."""
    found = list(places(bucket))
    copy = memory.store(tuple(tensor for tensor, _ in found), stream, bucket.pages)
    return moving(bucket, copy, found)


def fetch_state(bucket: Holder, memory: HostMemory, stream: str) -> StateCopy:
    """Start to copy all that the optimizer of a bucket keeps back to the device."""
    found = list(places(bucket))
    return moving(bucket, memory.fetch(tuple(tensor for tensor, _ in found), stream), found)


def moving(bucket: Holder, copy: Copying, found: list[Place]) -> StateCopy:
    bucket.copying = copy
    return StateCopy(copy, [put for _, put in found])


def place(bucket: Placed, state: State, device: torch.device) -> None:
    """Move to the host what waits there."""
    bucket.optimizer_on_host, memory = state.host, host_memory(device)
    if (state.host or state.on_host) and bucket.optimizer is not None:
        refuse_aliases(bucket.optimizer, bucket.parameters)
    if state.host:
        to_host(bucket, memory)
    if state.on_host:
        offloaded_parameters.to_host(bucket, memory)


def to_host(bucket: Holder, memory: HostMemory) -> None:
    """Before the first update: masters, and state that was loaded or made early."""
    state = store_state(bucket, memory, "")
    state.wait()
    state.copy.finish()


def places(bucket: Holder) -> Iterator[Place]:
    """Single numbers, such as a step count, stay where they are: optimizers read them there.

    But for those that are elements of what is moved.
    """
    states = bucket.optimizer.state.values() if bucket.optimizer is not None else ()
    held = [(one, *item) for one in states for item in one.items() if torch.is_tensor(item[1])]
    moved = {memory_of(value) for _, _, value in held if value.dim()}
    for state, key, value in held:
        if value.dim() or memory_of(value) in moved:
            yield value, entry(state, key)
    for _, master in bucket.copies:
        yield master.data, content(master)


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def entry(held: dict[str, Any], key: str) -> Put:
    def put(tensor: torch.Tensor) -> None:
        held[key] = tensor

    return put


def content(master: torch.nn.Parameter) -> Put:
    def put(tensor: torch.Tensor) -> None:
        master.data = tensor

    return put
