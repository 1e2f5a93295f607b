"""How a device reaches the others: one communicator per logical stream, everything asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from piper.names import TOTALS_STREAM
from piper.plan.analyse.channels import Link, Needs, Team
from piper.plan.instructions import Shape, is_dynamic
from piper.runtime.comm.exchange_thread import Courier
from piper.runtime.comm.token_routes import by_device, by_expert, by_source, local_counts, totals

Tensors = tuple[torch.Tensor, ...]
Group = tuple[int, ...]  # devices that put something together, in rising order
Room = tuple[torch.Tensor, list[int], list[int]]  # for rows, and how many go to and come from whom


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> object: ...


class Arrival(Protocol):
    """Something under way that ends with tensors."""

    def wait(self) -> Tensors: ...


class Shard(Protocol):
    """Something under way that ends with this device's shard of a sum."""

    def wait(self) -> torch.Tensor: ...


class Comm(Protocol):
    """What a worker needs of the others."""

    def send(self, tensors: Tensors, shapes: Sequence[Shape], peer: int, stream: str) -> Handle: ...

    def recv(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival: ...

    def all_reduce(self, flat: torch.Tensor, stream: str, group: Group) -> Handle: ...

    def reduce_scatter(self, flat: torch.Tensor, stream: str, group: Group) -> Shard: ...

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, stream: str, group: Group
    ) -> Handle: ...

    def exchange(
        self, rows: Tensors, where: Any, way: str, stream: str, group: Group
    ) -> Arrival: ...

    def add_up(self, tensor: torch.Tensor) -> Handle: ...


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
class SumOfPieces:
    """What all of a group sent to this one, to be added up in the order of the devices."""

    work: dist.Work
    pieces: torch.Tensor
    whole: torch.Tensor  # being sent: kept until it has been

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.pieces.sum(0)


@dataclass
class Journey:
    """An exchange, as a courier does it."""

    rows: Tensors
    where: Any  # counts, or the route
    way: str
    team: dist.ProcessGroup | None

    def __call__(self) -> tuple[Any, ...]:
        if self.way == "counted":
            return self.counted()
        sent, got = self.where
        if self.way == "out":
            return tuple(by_expert(self.moved(r, sent, got), got) for r in self.rows)
        return tuple(self.moved(r, got, sent) for r in self.leaving())

    def leaving(self) -> Iterator[torch.Tensor]:
        """Rows as they go back: device by device."""
        return (by_source(r, self.where[1]) for r in self.rows)

    def counted(self) -> tuple[Any, ...]:
        sent = self.seen()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.team)
        here = self.shown(got)  # before the rows: what comes behind them waits for them
        rows = [by_expert(self.moved(r, sent, got), got) for r in self.rows]
        return (*rows, here, (sent, got))

    def seen(self) -> torch.Tensor:
        """The counts, where the host can read them."""
        return by_device(self.where, dist.get_world_size(self.team))

    def shown(self, got: torch.Tensor) -> torch.Tensor:
        """How many rows the experts here get, where kernels can read it."""
        return local_counts(got, self.where)

    def moved(self, rows: torch.Tensor, sent: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """As bytes: not every type of a row is one that gloo knows."""
        arrived, give, take = self.room(rows, sent, got)
        dist.all_to_all_single(as_bytes(arrived), as_bytes(rows), take, give, group=self.team)
        return arrived

    def room(self, rows: torch.Tensor, sent: torch.Tensor, got: torch.Tensor) -> Room:
        take = totals(got)
        return rows.new_empty((sum(take), *rows.shape[1:])), totals(sent), take


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory, [rows, bytes of a row]."""
    flat = rows.contiguous().view(rows.shape[0], prod(rows.shape[1:]))
    return flat.view(torch.uint8)


@dataclass
class ProcessComm:
    """Processes joined by torch.distributed. Streams have process groups of their own."""

    device: torch.device = torch.device("cpu")
    groups: dict[Any, dist.ProcessGroup | None] = field(default_factory=dict)  # by stream or team
    couriers: dict[Team | Link, Courier] = field(default_factory=dict)
    sized: set[Link] = field(default_factory=set)  # where sizes come first
    backend: str | None = None  # of its groups; None: that of all processes

    def extend(self, needs: Needs) -> None:
        """Every process makes the same groups in the same order, those that it has not yet."""
        here = dist.get_rank() if dist.is_initialized() else 0
        self.sized.update(needs.sized)
        mine = [link for link in needs.sized if link[-1] == here]
        roads: tuple[Team | Link, ...] = (*needs.exchanging, *mine)
        for road in roads:
            if road not in self.couriers:
                self.couriers[road] = self.courier(road[0])
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        for stream in (*needs.streams, TOTALS_STREAM):
            if stream not in self.groups:
                self.groups[stream] = None if alone else self.group(stream)
        for team in needs.teams:
            if team not in self.groups:
                self.groups[team] = self.group(*team)

    def group(self, stream: str, devices: Group | None = None) -> dist.ProcessGroup | None:
        """A new communicator of a stream, of all processes or of some."""
        return dist.new_group(devices and list(devices), backend=self.backend)

    def courier(self, name: str) -> Courier:
        return Courier(name)

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
    ) -> Works:
        if any(map(is_dynamic, shapes)):
            shapes = self.sizes(shapes, peer, stream)
        tensors = into or tuple(empty(s, dtype, self.device) for s, dtype in shapes)  # type: ignore[arg-type]
        return Works([self.irecv(tensor, peer, stream) for tensor in tensors], tensors)

    def sizes(self, shapes: Sequence[Shape], peer: int, stream: str) -> list[Shape]:
        """They come first. A courier waits for them, so nothing that was sent later overtakes."""
        headers = tuple(empty((len(sizes),), "int64") for sizes, _ in shapes)
        Works([self.irecv(header, peer, stream) for header in headers], headers).wait()
        told = zip(headers, shapes, strict=True)
        return [(tuple(header.tolist()), dtype) for header, (_, dtype) in told]

    def isend(self, tensor: torch.Tensor, peer: int, stream: str) -> dist.Work:
        work = dist.isend(tensor, group=self.groups[stream], group_dst=peer)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, peer: int, stream: str) -> dist.Work:
        work = dist.irecv(tensor, group=self.groups[stream], group_src=peer)
        assert work is not None
        return work

    def started(self, road: Team | Link, start: Callable[[], Arrival]) -> Arrival:
        """Something of a group or link; where a courier works, it does all of it, in order."""
        courier = self.couriers.get(road)
        return courier.ask(lambda: start().wait()) if courier else start()

    def all_reduce(self, flat: torch.Tensor, stream: str, group: Group) -> Handle:
        team = self.groups[stream, group]
        return self.started(
            (stream, group),
            lambda: Works([dist.all_reduce(flat, group=team, async_op=True)], (flat,)),
        )

    def reduce_scatter(self, flat: torch.Tensor, stream: str, group: Group) -> Shard:
        """Pieces go straight to where they are added up: half the bytes of gloo's own."""
        team, pieces = self.groups[stream, group], torch.empty_like(flat)

        def start() -> Any:
            work = dist.all_to_all_single(pieces, flat, group=team, async_op=True)
            return SumOfPieces(work, pieces.view(len(group), -1), flat)

        return self.started((stream, group), start)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, stream: str, group: Group
    ) -> Handle:
        """As bytes: not every type of a parameter is one that gloo knows."""
        given, into = shard.view(torch.uint8), whole.view(torch.uint8)
        team = self.groups[stream, group]
        return self.started(
            (stream, group),
            lambda: Works([gather_flat(into, given, group=team, async_op=True)], (whole, shard)),
        )

    def exchange(self, rows: Tensors, where: Any, way: str, stream: str, group: Group) -> Arrival:
        team = stream, group
        return self.couriers[team].ask(self.journey(rows, where, way, team))

    def journey(self, rows: Tensors, where: Any, way: str, team: tuple[str, Group]) -> Journey:
        return Journey(rows, where, way, self.groups[team])

    def add_up(self, tensor: torch.Tensor) -> Handle:
        group = self.groups[TOTALS_STREAM]
        if group is None:
            return Works([], ())
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return work

    def close(self) -> None:
        for courier in self.couriers.values():
            courier.close()
        for group in self.groups.values():
            if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


# The newer name, where there is one: the older one warns.
gather_flat = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
