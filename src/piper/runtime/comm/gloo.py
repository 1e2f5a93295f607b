"""Communication through torch.distributed: one process group per stream, all asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from piper.names import TOTALS_STREAM
from piper.plan.analyse.mailbox_sizes import Link
from piper.plan.analyse.required_communicators import RequiredCommunicators, Team
from piper.plan.instructions import Shape, is_dynamic
from piper.runtime.comm.exchange_thread import ExchangeThread
from piper.runtime.comm.token_routes import by_device, by_expert, by_source, local_counts, totals
from piper.runtime.processes.world import closed_at_exit, patience

Tensors = tuple[torch.Tensor, ...]
Group = tuple[int, ...]  # devices of a collective, in rising order
Buffer = tuple[torch.Tensor, list[int], list[int]]  # for rows; input and output split sizes


class Handle(Protocol):
    """A message in flight."""

    def wait(self) -> object: ...


class Arrival(Protocol):
    """A message in flight that brings tensors."""

    def wait(self) -> Tensors: ...


class Shard(Protocol):
    """A message in flight that brings this device's shard of a sum."""

    def wait(self) -> torch.Tensor: ...


class Comm(Protocol):
    """How a worker communicates with the other devices."""

    def send(self, tensors: Tensors, shapes: Sequence[Shape], peer: int, stream: str) -> Handle: ...

    def recv(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival: ...

    def all_reduce(self, flat: torch.Tensor, stream: str, group: Group) -> Handle: ...

    def reduce_scatter(self, flat: torch.Tensor, stream: str, group: Group) -> Shard: ...

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, stream: str, group: Group
    ) -> Handle: ...

    def all_to_all_single(
        self, arrived: torch.Tensor, given: torch.Tensor, stream: str, group: Group
    ) -> Handle: ...

    def shift(
        self, arrived: torch.Tensor, given: torch.Tensor, by: int, stream: str, group: Group
    ) -> Handle: ...

    def exchange(
        self, rows: Tensors, where: Any, way: str, stream: str, group: Group
    ) -> Arrival: ...

    def add_up(self, tensor: torch.Tensor) -> Handle: ...


def empty(sizes: Sequence[int], dtype: str, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty(tuple(sizes), dtype=getattr(torch, dtype), device=device)


@dataclass(slots=True)
class Works:
    """Several works as one. Keeps their tensors alive until `wait` returns."""

    works: Sequence[Handle]
    tensors: Tensors

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class SumOfPieces:
    """This device's piece from every device of a group, to be summed in the order of devices."""

    work: dist.Work
    pieces: torch.Tensor
    whole: torch.Tensor  # kept alive until it has been sent

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.pieces.sum(0)


@dataclass
class TokenAllToAll:
    """One token all-to-all (dispatch or combine), as an exchange thread runs it."""

    rows: Tensors
    where: Any  # the counts, or the route
    way: str
    team: dist.ProcessGroup | None

    def __call__(self) -> tuple[Any, ...]:
        return self.counted() if self.way == "counted" else self.routed()

    def routed(self) -> Tensors:
        sent, got = self.where
        if self.way == "out":
            return tuple(by_expert(self.moved(r, sent, got), got) for r in self.rows)
        return tuple(self.moved(r, got, sent) for r in self.rows_by_source())

    def rows_by_source(self) -> Iterator[torch.Tensor]:
        """Rows of a combine, sorted by the device that they go back to."""
        return (by_source(r, self.where[1]) for r in self.rows)

    def counted(self) -> tuple[Any, ...]:
        sent = self.counts_on_host()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.team)
        here = self.counts_on_device(got)  # before the rows, which later work would wait for
        rows = [by_expert(self.moved(r, sent, got), got) for r in self.rows]
        return (*rows, here, (sent, got))

    def counts_on_host(self) -> torch.Tensor:
        """How many rows go to each expert, where the host can read it."""
        return by_device(self.where, dist.get_world_size(self.team))

    def counts_on_device(self, got: torch.Tensor) -> torch.Tensor:
        """How many rows the experts here get, where kernels can read it."""
        return local_counts(got, self.where)

    def moved(self, rows: torch.Tensor, sent: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """As bytes, because gloo does not know every dtype."""
        arrived, give, take = self.buffer(rows, sent, got)
        dist.all_to_all_single(as_bytes(arrived), as_bytes(rows), take, give, group=self.team)
        return arrived

    def buffer(self, rows: torch.Tensor, sent: torch.Tensor, got: torch.Tensor) -> Buffer:
        take = totals(got)
        return rows.new_empty((sum(take), *rows.shape[1:])), totals(sent), take


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as [rows, bytes of a row]."""
    flat = rows.contiguous().view(rows.shape[0], prod(rows.shape[1:]))
    return flat.view(torch.uint8)


@dataclass(eq=False)
class ProcessComm:
    """Processes joined by torch.distributed. Each stream has its own process group."""

    device: torch.device = torch.device("cpu")
    groups: dict[Any, dist.ProcessGroup | None] = field(default_factory=dict)  # by stream or team
    threads: dict[Team | Link, ExchangeThread] = field(default_factory=dict)
    dynamic_links: set[Link] = field(default_factory=set)  # links whose messages start with sizes
    backend: str | None = None  # of its groups; None: the default group's
    totals: list[Team | None] = field(default_factory=list)  # as each program wants to add up

    def extend(self, needs: RequiredCommunicators) -> None:
        """Make the groups that are missing. Every process makes the same ones in the same order."""
        closed_at_exit(self)
        self.totals.append(needs.totals)
        here = dist.get_rank() if dist.is_initialized() else 0
        self.dynamic_links.update(needs.dynamic_links)
        mine = [link for link in needs.dynamic_links if link[-1] == here]
        served: tuple[Team | Link, ...] = (*needs.token_groups, *mine)
        for channel in served:
            if channel not in self.threads:
                self.threads[channel] = self.new_thread(channel[0])
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        for stream in (*needs.streams, TOTALS_STREAM):
            if stream not in self.groups:
                self.groups[stream] = None if alone else self.group(stream)
        for team in needs.teams:
            if team not in self.groups:
                self.groups[team] = self.group(*team)

    def group(self, stream: str, devices: Group | None = None) -> dist.ProcessGroup | None:
        """A new process group of a stream, with all processes or some of them."""
        ranks = devices and list(devices)
        return dist.new_group(ranks, backend=self.backend, timeout=patience())

    def new_thread(self, name: str) -> ExchangeThread:
        return ExchangeThread(name)

    def send(self, tensors: Tensors, shapes: Sequence[Shape], peer: int, stream: str) -> Handle:
        whole = tuple(tensor.contiguous() for tensor in tensors)
        sizes: Tensors = ()
        if any(map(is_dynamic, shapes)):
            sizes = tuple(torch.tensor(one.shape, dtype=torch.int64, device="cpu") for one in whole)
        tensors = (*sizes, *whole)
        return Works([self.isend(tensor, peer, stream) for tensor in tensors], tensors)

    def recv(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival:
        link = stream, peer, dist.get_rank()
        return self.started(link, lambda: self.arrival(shapes, peer, stream, into))

    def arrival(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival:
        if any(map(is_dynamic, shapes)):
            shapes = self.sizes(shapes, peer, stream)
        tensors = into or self.room_for(shapes)
        return Works([self.irecv(tensor, peer, stream) for tensor in tensors], tensors)

    def room_for(self, shapes: Sequence[Shape]) -> Tensors:
        return tuple(empty(sizes, dtype, self.device) for sizes, dtype in shapes)  # type: ignore[arg-type]

    def sizes(self, shapes: Sequence[Shape], peer: int, stream: str) -> list[Shape]:
        """Receive the sizes, which come first. An exchange thread waits here, so order is kept."""
        headers = tuple(empty((len(sizes),), "int64") for sizes, _ in shapes)
        Works([self.irecv(header, peer, stream) for header in headers], headers).wait()
        pairs = zip(headers, shapes, strict=True)
        return [(tuple(header.tolist()), dtype) for header, (_, dtype) in pairs]

    def isend(self, tensor: torch.Tensor, peer: int, stream: str) -> Handle:
        work = dist.isend(tensor, group=self.groups[stream], group_dst=peer)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, peer: int, stream: str) -> dist.Work:
        work = dist.irecv(tensor, group=self.groups[stream], group_src=peer)
        assert work is not None
        return work

    def started(self, channel: Team | Link, start: Callable[[], Arrival]) -> Arrival:
        """Start a message. If the channel has a thread, it runs all its messages, in order."""
        thread = self.threads.get(channel)
        return thread.submit(lambda: start().wait()) if thread else start()

    def all_reduce(self, flat: torch.Tensor, stream: str, group: Group) -> Handle:
        team = self.groups[stream, group]
        return self.started(
            (stream, group),
            lambda: Works([dist.all_reduce(flat, group=team, async_op=True)], (flat,)),
        )

    def reduce_scatter(self, flat: torch.Tensor, stream: str, group: Group) -> Shard:
        """An all-to-all and a local sum: half the bytes of gloo's reduce-scatter."""
        team, pieces = self.groups[stream, group], torch.empty_like(flat)

        def start() -> Any:
            work = dist.all_to_all_single(pieces, flat, group=team, async_op=True)
            return SumOfPieces(work, pieces.view(len(group), -1), flat)

        return self.started((stream, group), start)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, stream: str, group: Group
    ) -> Handle:
        """As bytes, because gloo does not know every dtype."""
        given, into = shard.view(torch.uint8), whole.view(torch.uint8)
        team = self.groups[stream, group]
        return self.started(
            (stream, group),
            lambda: Works([gather_flat(into, given, group=team, async_op=True)], (whole, shard)),
        )

    def all_to_all_single(
        self, arrived: torch.Tensor, given: torch.Tensor, stream: str, group: Group
    ) -> Handle:
        """Equal slices of flat tensors, as bytes, because gloo does not know every dtype."""
        into, sent = arrived.view(torch.uint8), given.view(torch.uint8)
        team = self.groups[stream, group]

        def start() -> Any:
            work = dist.all_to_all_single(into, sent, group=team, async_op=True)
            return Works([work], (arrived, given))

        return self.started((stream, group), start)

    def shift(
        self, arrived: torch.Tensor, given: torch.Tensor, by: int, stream: str, group: Group
    ) -> Handle:
        """To the device `by` places further in the group: an all-to-all with one slice that is not
        empty.
        """
        into, sent = arrived.view(torch.uint8), given.view(torch.uint8)
        team, here, ways = self.groups[stream, group], group.index(dist.get_rank()), len(group)
        give = [len(sent) if k == (here + by) % ways else 0 for k in range(ways)]
        take = [len(into) if k == (here - by) % ways else 0 for k in range(ways)]

        def start() -> Any:
            work = dist.all_to_all_single(into, sent, take, give, group=team, async_op=True)
            return Works([work], (arrived, given))

        return self.started((stream, group), start)

    def exchange(self, rows: Tensors, where: Any, way: str, stream: str, group: Group) -> Arrival:
        team = stream, group
        return self.threads[team].submit(self.all_to_all(rows, where, way, team))

    def all_to_all(
        self, rows: Tensors, where: Any, way: str, team: tuple[str, Group]
    ) -> TokenAllToAll:
        return TokenAllToAll(rows, where, way, self.groups[team])

    @property
    def totals_key(self) -> Team | str:
        """The group that adds up. Programs that disagree need one of their own."""
        wanted = set(self.totals)
        return (wanted.pop() if len(wanted) == 1 else None) or TOTALS_STREAM

    def add_up(self, tensor: torch.Tensor) -> Handle:
        group = self.groups[self.totals_key]
        if group is None:
            return Works([], ())
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return work

    def close(self) -> None:
        for thread in self.threads.values():
            thread.close()
        for group in self.groups.values():
            if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self.groups.clear()


# Newer versions of torch have the first name, and warn about the second.
gather_flat = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
