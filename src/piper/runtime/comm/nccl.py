"""Messages between GPUs: one NCCL communicator for each stream and group, none made on the way.

NCCL's works never block the host: to wait for one is to let the current stream wait. What is under
way keeps its tensors until then, so their memory is not used again too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from piper.names import HIGH, Share
from piper.plan.analyse.channels import Link, Needs
from piper.runtime.comm.exchange_thread import Courier, Errand
from piper.runtime.comm.gloo import Group, Journey, ProcessComm, Room, Shard, Tensors, gather_flat
from piper.runtime.comm.token_routes import by_source, refuse_uncounted
from piper.runtime.gpu.stream_shares import group_options, priority_of, share_of
from piper.runtime.torch_private import pytree


@dataclass(slots=True)
class Scattered:
    """A shard of a sum, once the current stream has waited for it."""

    work: dist.Work
    shard: torch.Tensor
    whole: torch.Tensor  # being sent

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.shard


@dataclass
class CudaJourney(Journey):
    """An exchange of which nothing is left to do, when its rows are there, but to send them.

    What goes back is sorted already, on the stream that computed it.
    """

    looking: torch.cuda.Stream
    rooms: list[Room] = field(default_factory=list)

    def prepare(self) -> None:
        """Where the number of rows is known; it waits for nothing, and reads no row."""
        if self.way != "counted":
            ways = self.where if self.way == "out" else self.where[::-1]
            self.rooms = [super(CudaJourney, self).room(rows, *ways) for rows in self.rows]

    def room(self, rows: torch.Tensor, sent: torch.Tensor, got: torch.Tensor) -> Room:
        return self.rooms.pop(0) if self.rooms else super().room(rows, sent, got)

    def leaving(self) -> Iterator[torch.Tensor]:
        return iter(self.rows)

    def seen(self) -> torch.Tensor:
        """On a stream of its own: those of the courier are behind the rows of earlier exchanges."""
        with torch.cuda.stream(self.looking):
            counts = super().seen()
        refuse_uncounted(counts, self.rows[0])  # before others wait for what is never sent
        return counts

    def shown(self, got: torch.Tensor) -> torch.Tensor:
        """From pinned memory: else the host waits for all that was queued before."""
        here = got.sum(0).to(self.where.dtype).pin_memory()
        return here.to(self.where.device, non_blocking=True)


class CudaComm(ProcessComm):
    """Processes with a GPU each, or a share of one."""

    def extend(self, needs: Needs) -> None:
        """All processes make the same communicators in the same order, and use each of them once.

        NCCL makes them, and the connections of each kind of message, at their first use: the host
        then waits for the others, and two that are made crosswise hang.
        """
        self.backend, self.shares = "cpu:gloo,cuda:nccl", needs.shares
        first = "totals" not in self.groups
        new = [team for team in needs.teams if team not in self.groups]
        late = set(needs.sized) - self.sized  # a courier's messages have a queue of their own
        links = [link for link in needs.links if link in late or link not in self.groups]
        super().extend(needs)
        for link in links:
            if link in self.groups:
                self.groups["before", link] = self.groups[link]
            self.groups[link] = self.group(link[0], link[1:], "nccl")
        if first:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.groups["totals"])
        for link in links:
            self.first_message(link)
        for team in new:
            if dist.get_rank() in team[1]:
                self.first_meeting(self.groups[team], len(team[1]))

    def group(
        self, stream: str, devices: Group | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        exchanges = (stream, devices) in self.couriers
        served = exchanges or (backend and devices and (stream, *devices) in self.sized)
        share = self.share_of_courier(stream) if served else share_of(self.shares, stream)
        options = group_options(share, backend is not None or exchanges)
        ranks = devices and sorted(devices)
        return dist.new_group(ranks, backend=backend or self.backend, **options)

    def first_meeting(self, team: dist.ProcessGroup | None, size: int) -> None:
        one, all_of_them = torch.zeros(1, device="cuda"), torch.zeros(size, device="cuda")
        dist.all_reduce(one, group=team)
        gather_flat(all_of_them, one, group=team)
        dist.reduce_scatter_tensor(one, all_of_them, group=team)
        dist.all_to_all_single(torch.empty_like(all_of_them), all_of_them, group=team)

    def first_message(self, link: Link) -> None:
        _, source, target = link
        tensor = torch.zeros(1, device="cuda")
        if dist.get_rank() == source:
            dist.send(tensor, target, group=self.groups[link])
        elif dist.get_rank() == target:
            dist.recv(tensor, source, group=self.groups[link])

    def journey(self, rows: Tensors, where: Any, way: str, team: tuple[str, Group]) -> Journey:
        courier = self.couriers[team]
        assert isinstance(courier, CudaCourier)
        if way == "back":
            rows = tuple(by_source(r, where[1]) for r in rows)
        return CudaJourney(rows, where, way, self.groups[team], courier.looking)

    def courier(self, name: str) -> Courier:
        return CudaCourier(name, priority_of(self.share_of_courier(name)))

    def share_of_courier(self, stream: str) -> Share:
        """High priority, whatever the strategy says: such streams have queues of their own.

        The host is ahead of a courier. In one queue with compute, an exchange would come behind a
        wait for what others send only once they have had this exchange.
        """
        return replace(share_of(self.shares, stream), priority=HIGH)

    def isend(self, tensor: torch.Tensor, peer: int, stream: str) -> dist.Work:
        if tensor.device.type == "cpu":  # sizes, which the host needs
            return super().isend(tensor, peer, stream)
        here = dist.get_rank()
        work = dist.isend(tensor, peer, group=self.groups[stream, here, peer])
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, peer: int, stream: str) -> dist.Work:
        if tensor.device.type == "cpu":
            return super().irecv(tensor, peer, stream)
        work = dist.irecv(tensor, peer, group=self.groups[stream, peer, dist.get_rank()])
        assert work is not None
        return work

    def reduce_scatter(self, flat: torch.Tensor, stream: str, group: Group) -> Shard:
        team = self.groups[stream, group]
        shard = flat.new_empty(flat.numel() // len(group))

        def start() -> Any:
            work = dist.reduce_scatter_tensor(shard, flat, group=team, async_op=True)
            return Scattered(work, shard, flat)

        return self.started((stream, group), start)


class CudaCourier(Courier):
    """A courier whose errands run on two CUDA streams of its own, in turn.

    While a message is on its way, the rows that the one before it brought are sorted. Messages stay
    in order: NCCL lets one of a communicator begin when the one before it has ended, whatever
    streams they are on.
    """

    def __init__(self, name: str, priority: int = 0) -> None:
        self.device = torch.cuda.current_device()
        self.sides = cycle([torch.cuda.Stream(priority=priority) for _ in range(2)])
        self.looking = torch.cuda.Stream(priority=priority)
        pin_counts()
        super().__init__(name)

    def ask(self, job: Callable[[], Any]) -> Errand:
        """It begins when all that is queued now has ended; who waits lets its stream wait."""
        compute = torch.cuda.current_stream()
        errand = super().ask(partial(self.beside, job, compute.record_event(), compute))
        return CudaErrand(errand.job, errand.done)

    def beside(
        self, job: Callable[[], Any], ready: torch.cuda.Event, compute: torch.cuda.Stream
    ) -> tuple[Any, torch.cuda.Event]:
        torch.cuda.set_device(self.device)
        side = next(self.sides)
        with torch.cuda.stream(side):
            if isinstance(job, CudaJourney):
                job.prepare()
            ready.synchronize()  # here: a wait that is queued would hold up all else in its queue
            found = job()
            for tensor in tensors_in(found):
                tensor.record_stream(compute)
            return found, side.record_event()


@cache
def pin_counts() -> None:
    """Memory for counts of any number of experts, kept for later: to pin some may wait for the GPU,
    and in the middle of a step the GPU may wait for messages."""
    several = 4  # exchanges whose counts are under way at once
    sizes = [2**k for k in range(11)] * several
    held = [torch.empty(size, dtype=torch.int64, pin_memory=True) for size in sizes]
    held.clear()  # torch keeps what is pinned


class CudaErrand(Errand):
    """Ends with what was found, once the current stream has waited for it."""

    def wait(self) -> Any:
        found, event = self.done.result()
        torch.cuda.current_stream().wait_event(event)
        return found


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    leaves: Sequence[Any] = pytree.tree_leaves(found)
    return (one for one in leaves if isinstance(one, torch.Tensor) and one.is_cuda)
