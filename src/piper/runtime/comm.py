"""How a device reaches the others: one communicator per logical stream, everything asynchronous."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from piper.plan.instructions import Shape

Tensors = tuple[torch.Tensor, ...]


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> object: ...


class Arrival(Protocol):
    """Something under way that ends with tensors."""

    def wait(self) -> Tensors: ...


class Comm(Protocol):
    """What a worker needs of the others."""

    def send(self, tensors: Tensors, shapes: Sequence[Shape], peer: int, stream: str) -> Handle: ...

    def recv(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival: ...

    def add_up(self, tensor: torch.Tensor) -> Handle: ...


def is_dynamic(shape: Shape) -> bool:
    return any(size is None for size in shape[0])


def empty(sizes: Sequence[int], dtype: str, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty(tuple(sizes), dtype=getattr(torch, dtype), device=device)


@dataclass(slots=True)
class Works:
    """Several works as one; keeps the tensors alive until they have been waited for."""

    works: list[dist.Work]
    tensors: Tensors

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class SizedLater:
    """Tensors whose sizes come first, because they depend on data."""

    comm: ProcessComm
    shapes: Sequence[Shape]
    headers: list[tuple[dist.Work, torch.Tensor]]
    peer: int
    stream: str

    def wait(self) -> Tensors:
        tensors = []
        for (work, sizes), (_, dtype) in zip(self.headers, self.shapes, strict=True):
            work.wait()
            tensors.append(empty(sizes.tolist(), dtype))
        works = [self.comm.irecv(tensor, self.peer, self.stream) for tensor in tensors]
        return Works(works, tuple(tensors)).wait()


@dataclass
class ProcessComm:
    """Processes joined by torch.distributed. Streams have process groups of their own."""

    streams: Sequence[str]
    groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Every process makes the same groups in the same order."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        for stream in (*self.streams, "totals"):
            self.groups[stream] = None if alone else dist.new_group()

    def send(self, tensors: Tensors, shapes: Sequence[Shape], peer: int, stream: str) -> Handle:
        whole = tuple(tensor.contiguous() for tensor in tensors)
        sizes: Tensors = ()
        if any(map(is_dynamic, shapes)):
            sizes = tuple(torch.tensor(tensor.shape, dtype=torch.int64) for tensor in whole)
        works = [self.isend(tensor, peer, stream) for tensor in (*sizes, *whole)]
        return Works(works, (*sizes, *whole))

    def recv(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival:
        if any(map(is_dynamic, shapes)):
            sizes = [empty((len(shape),), "int64") for shape, _ in shapes]
            headers = [(self.irecv(tensor, peer, stream), tensor) for tensor in sizes]
            return SizedLater(self, shapes, headers, peer, stream)
        tensors = into or tuple(empty(shape, dtype) for shape, dtype in shapes)  # type: ignore[arg-type]
        return Works([self.irecv(tensor, peer, stream) for tensor in tensors], tensors)

    def isend(self, tensor: torch.Tensor, peer: int, stream: str) -> dist.Work:
        work = dist.isend(tensor, group=self.groups[stream], group_dst=peer)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, peer: int, stream: str) -> dist.Work:
        work = dist.irecv(tensor, group=self.groups[stream], group_src=peer)
        assert work is not None
        return work

    def add_up(self, tensor: torch.Tensor) -> Handle:
        group = self.groups["totals"]
        if group is None:
            return Works([], ())
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return work

    def close(self) -> None:
        for group in self.groups.values():
            if group is not None:
                dist.destroy_process_group(group)


Message = Future[Tensors]


@dataclass
class Hub:
    """Joins devices that are threads of one process; for tests, and for looking at a strategy."""

    devices: int
    timeout: float = 60.0
    messages: dict[tuple[str, int, int, int], Message] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sums: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.devices)

    def message(self, stream: str, source: int, target: int, number: int) -> Message:
        """The n-th message of a channel, whether it was sent or asked for first."""
        with self.lock:
            return self.messages.setdefault((stream, source, target, number), Message())


class Done:
    """Has ended already."""

    def wait(self) -> None: ...


@dataclass
class ThreadComm:
    """One device of a hub."""

    hub: Hub
    device: int
    round: int = 0
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)

    def send(self, tensors: Tensors, shapes: Sequence[Shape], peer: int, stream: str) -> Handle:
        number = self.sent[stream, peer]
        self.sent[stream, peer] += 1
        copies = tuple(tensor.detach().clone() for tensor in tensors)
        self.hub.message(stream, self.device, peer, number).set_result(copies)
        return Done()

    def recv(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival:
        number = self.asked[stream, peer]
        self.asked[stream, peer] += 1
        message = self.hub.message(stream, peer, self.device, number)
        return Pickup(message, into, self.hub.timeout)

    def add_up(self, tensor: torch.Tensor) -> Handle:
        self.round += 1
        return SumUp(self.hub, self.round, tensor)


@dataclass
class Pickup:
    """A message that may not be there yet."""

    message: Message
    into: Tensors | None
    timeout: float

    def wait(self) -> Tensors:
        tensors = self.message.result(timeout=self.timeout)
        for state, new in zip(self.into or (), tensors, strict=False):
            state.copy_(new)
        return self.into or tensors


@dataclass
class SumUp:
    """Adds a tensor up over all threads, in place."""

    hub: Hub
    round: int
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        if self.done:
            return
        with self.hub.lock:
            self.hub.sums.setdefault(self.round, []).append(self.tensor.clone())
        self.hub.barrier.wait(self.hub.timeout)
        parts = sorted(self.hub.sums[self.round], key=lambda t: t.tolist())
        self.tensor.copy_(torch.stack(parts).sum(0))
        self.done = True
