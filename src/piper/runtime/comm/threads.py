"""Communication between devices that are threads of one process, for tests and rehearsals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from piper.plan.instructions import Shape
from piper.runtime.comm.gloo import Arrival, Group, Handle, Shard, Tensors
from piper.runtime.comm.token_routes import by_device, by_expert, by_source, gathered, local_counts

Message = Future[Tensors]
Follow = Callable[[list[torch.Tensor]], Any]
Found = TypeVar("Found")


@dataclass
class Meeting:
    """A collective: the tensors that the devices of a group bring, complete when all have."""

    size: int
    brought: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: Future[list[torch.Tensor]] = field(default_factory=Future)
    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: int = 0

    def left(self) -> bool:
        """Note that one device has its result. Returns whether all have."""
        with self.lock:
            self.gone += 1
            return self.gone == self.size

    def bring(self, device: int, tensor: torch.Tensor) -> None:
        with self.lock:
            self.brought[device] = tensor.detach().clone()
            if len(self.brought) == self.size and not self.complete.done():
                self.complete.set_result([self.brought[d] for d in sorted(self.brought)])


@dataclass
class Hub:
    """Connects devices that are threads of one process.

    One device runs at a time, until it has to wait. If all threads ran at once, they would spend
    most of their time passing the interpreter lock around.
    """

    devices: int
    timeout: float = 600.0  # only a limit: `fail` wakes all who wait for a device that stopped
    messages: dict[tuple[str, int, int, int], Message] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    turn: threading.Lock = field(default_factory=threading.Lock)  # held by the device that runs
    sums: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    meetings: dict[tuple[str, Group, int], Meeting] = field(default_factory=dict)
    broken: bool = False

    def meeting(self, stream: str, group: Group, number: int) -> Meeting:
        """The n-th collective of a group on a stream."""
        with self.lock:
            found = self.meetings.setdefault((stream, group, number), Meeting(len(group)))
            self.refuse_if_broken(found.complete)
            return found

    def waited(self, wait: Callable[[float], Found]) -> Found:
        """Wait, and let another device run meanwhile."""
        if not self.turn.locked():  # a device alone takes no turns
            return wait(self.timeout)
        self.turn.release()
        try:
            return wait(self.timeout)
        finally:
            self.turn.acquire()

    def result(self, future: Future[Found]) -> Found:
        return future.result() if future.done() else self.waited(future.result)

    def fail(self) -> None:
        """After a device stopped, wake all that wait for it."""
        with self.lock:
            self.broken = True
            waiting: list[Future[Any]] = [*self.messages.values()]
            waiting += [meeting.complete for meeting in self.meetings.values()]
            for future in waiting:
                self.refuse_if_broken(future)
        self.barrier.abort()

    def refuse_if_broken(self, future: Future[Any]) -> None:
        if self.broken and not future.done():
            future.set_exception(ConnectionError("another device stopped"))

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.devices)

    def message(self, stream: str, source: int, target: int, number: int) -> Message:
        """The n-th message of a channel, made by the sender or the receiver, the first of them."""
        with self.lock:
            found = self.messages.setdefault((stream, source, target, number), Message())
            self.refuse_if_broken(found)
            return found


class Done:
    """A message that is already delivered."""

    def wait(self) -> None: ...


@dataclass
class ThreadComm:
    """One device of a hub."""

    hub: Hub
    device: int
    round: int = 0
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    met: Counter[tuple[str, Group]] = field(default_factory=Counter)

    def send(self, tensors: Tensors, shapes: Sequence[Shape], peer: int, stream: str) -> Handle:
        number = self.sent[stream, peer]
        self.sent[stream, peer] += 1
        copies = tuple(tensor.detach().clone() for tensor in tensors)
        message = self.hub.message(stream, self.device, peer, number)
        if not self.hub.broken:
            message.set_result(copies)
        return Done()

    def recv(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival:
        number = self.asked[stream, peer]
        self.asked[stream, peer] += 1
        message = self.hub.message(stream, peer, self.device, number)
        key = (stream, peer, self.device, number)
        return Pickup(self.hub, message, into, lambda: self.hub.messages.pop(key, None))

    def meet(self, tensor: torch.Tensor, stream: str, group: Group, then: Follow) -> Later:
        """Bring a tensor to the group's collective. `then` makes the result when all have."""
        key = stream, group, self.met[stream, group]
        meeting = self.hub.meeting(*key)
        self.met[stream, group] += 1
        meeting.bring(self.device, tensor)

        def forget() -> None:
            if meeting.left():
                self.hub.meetings.pop(key, None)

        return Later(self.hub, meeting.complete, then, forget)

    def all_reduce(self, flat: torch.Tensor, stream: str, group: Group) -> Handle:
        return self.meet(flat, stream, group, lambda parts: flat.copy_(torch.stack(parts).sum(0)))

    def reduce_scatter(self, flat: torch.Tensor, stream: str, group: Group) -> Shard:
        mine, ways = group.index(self.device), len(group)

        def shard(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([part.view(ways, -1)[mine] for part in parts]).sum(0)

        return self.meet(flat, stream, group, shard)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, stream: str, group: Group
    ) -> Handle:
        """Of a copy: the shard may be in a gather buffer that is used again before all have it."""
        given = shard.clone()
        return self.meet(given, stream, group, lambda parts: whole.copy_(torch.cat(parts)))

    def all_to_all_single(
        self, arrived: torch.Tensor, given: torch.Tensor, stream: str, group: Group
    ) -> Handle:
        mine, ways = group.index(self.device), len(group)

        def swap(parts: list[torch.Tensor]) -> torch.Tensor:
            return arrived.copy_(torch.cat([part.chunk(ways)[mine] for part in parts]))

        return self.meet(given, stream, group, swap)

    def shift(
        self, arrived: torch.Tensor, given: torch.Tensor, by: int, stream: str, group: Group
    ) -> Handle:
        source = (group.index(self.device) - by) % len(group)
        return self.meet(given, stream, group, lambda parts: arrived.copy_(parts[source]))

    def exchange(self, rows: Tensors, where: Any, way: str, stream: str, group: Group) -> Arrival:
        """Each device brings its rows, and how many of them are for each expert or device."""
        mine = group.index(self.device)
        sent = by_device(where, len(group)) if way == "counted" else where[way == "back"]
        if way == "back":
            rows = tuple(by_source(r, sent) for r in rows)
        met = [self.meet(sent, stream, group, lambda parts: torch.stack(parts))]
        met += [self.meet(r, stream, group, list) for r in rows]

        def arrive() -> tuple[Any, ...]:
            matrices, *brought = [later.wait() for later in met]
            got = torch.stack([matrix[mine] for matrix in matrices])
            here = [gathered(list(zip(parts, matrices, strict=True)), mine) for parts in brought]
            if way != "back":
                here = [by_expert(r, got) for r in here]
            return (*here, local_counts(got, where), (sent, got)) if way == "counted" else (*here,)

        return Then(arrive)

    def add_up(self, tensor: torch.Tensor) -> Handle:
        self.round += 1
        return SumUp(self.hub, self.round, tensor)


@dataclass
class Then:
    """A result that is put together in `wait`."""

    arrive: Callable[[], tuple[Any, ...]]

    def wait(self) -> tuple[Any, ...]:
        return self.arrive()


@dataclass
class Later:
    """The result of a collective, when all devices have brought their tensors."""

    hub: Hub
    complete: Future[list[torch.Tensor]]
    then: Follow
    forget: Callable[[], None]

    def wait(self) -> Any:
        result = self.then(self.hub.result(self.complete))
        self.forget()
        return result


@dataclass
class Pickup:
    """A message that may not have arrived yet."""

    hub: Hub
    message: Message
    into: Tensors | None
    forget: Callable[[], object]

    def wait(self) -> Tensors:
        tensors = self.hub.result(self.message)
        self.forget()
        for state, new in zip(self.into or (), tensors, strict=False):
            state.copy_(new)
        return self.into or tensors


@dataclass
class SumUp:
    """An all-reduce of a tensor over all threads, in place."""

    hub: Hub
    round: int
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        if self.done:
            return
        with self.hub.lock:
            self.hub.sums.setdefault(self.round, []).append(self.tensor.clone())
        self.hub.waited(self.hub.barrier.wait)
        parts = sorted(self.hub.sums[self.round], key=lambda t: t.tolist())
        self.tensor.copy_(torch.stack(parts).sum(0))
        self.done = True
