"""Messages between GPUs: one NCCL communicator per stream and group, made before the first step.

Processes that share a GPU have mailboxes instead of communicators for point-to-point messages, and
copy the rows of token all-to-alls into each other's memory.

Waiting for an NCCL work never blocks the host. It makes the current stream wait. A message in
flight keeps its tensors alive until then, so that their memory is not reused too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from piper.names import HIGH, TOTALS_STREAM, Share
from piper.plan.analyse.mailbox_sizes import Link
from piper.plan.analyse.required_communicators import RequiredCommunicators
from piper.plan.instructions import Shape
from piper.runtime.comm.exchange_thread import ExchangeThread, Task
from piper.runtime.comm.gloo import (
    Arrival,
    Buffer,
    Group,
    Handle,
    ProcessComm,
    Shard,
    Tensors,
    TokenAllToAll,
    gather_flat,
)
from piper.runtime.comm.shared_gpu.mailbox import Delivery
from piper.runtime.comm.shared_gpu.mailboxes import Mailboxes, are_used
from piper.runtime.comm.shared_gpu.shared_rows import SharedGroups, SharedRows
from piper.runtime.comm.stream_shares import few_ctas, group_options, priority_of, share_of
from piper.runtime.comm.token_routes import (
    by_expert,
    by_source,
    expert_by_expert,
    refuse_uncounted,
    totals,
)
from piper.runtime.processes.world import patience
from piper.runtime.torch_private import pytree


@dataclass(slots=True)
class Scattered:
    """A shard of a sum. `wait` makes the current stream wait for it."""

    work: dist.Work
    shard: torch.Tensor
    whole: torch.Tensor  # kept alive until it has been sent

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.shard


@dataclass
class CudaTokenAllToAll(TokenAllToAll):
    """A token all-to-all that is prepared before its rows are computed, so that it starts at once.

    Rows of a combine are already sorted, on the stream that computed them.
    """

    counts_stream: torch.cuda.Stream
    buffers: list[Buffer] = field(default_factory=list)

    def prepare(self) -> None:
        """Allocate buffers if the number of rows is known. Waits for nothing and reads no row."""
        if self.way != "counted":
            ways = self.where if self.way == "out" else self.where[::-1]
            self.buffers = [super(CudaTokenAllToAll, self).buffer(r, *ways) for r in self.rows]

    def buffer(self, rows: torch.Tensor, sent: torch.Tensor, got: torch.Tensor) -> Buffer:
        return self.buffers.pop(0) if self.buffers else super().buffer(rows, sent, got)

    def rows_by_source(self) -> Iterator[torch.Tensor]:
        return iter(self.rows)

    def counts_on_host(self) -> torch.Tensor:
        """On its own stream: the thread's other streams wait for the rows of earlier exchanges."""
        with torch.cuda.stream(self.counts_stream):
            counts = super().counts_on_host()
        refuse_uncounted(counts, self.rows[0])  # before peers wait for rows that never come
        return counts

    def counts_on_device(self, got: torch.Tensor) -> torch.Tensor:
        """From pinned memory: otherwise the host waits for everything queued before."""
        here = got.sum(0).to(self.where.dtype).pin_memory()
        return here.to(self.where.device, non_blocking=True)


@dataclass
class SharedTokenAllToAll(CudaTokenAllToAll):
    """A token all-to-all between processes that share a GPU. Rows that do not fit go by NCCL."""

    shared: SharedRows = field(kw_only=True)

    def prepare(self) -> None:
        """Rows are sorted from where they arrive into memory that is made then."""

    def routed(self) -> Tensors:
        given, taken = self.where if self.way == "out" else self.where[::-1]
        _, fit = self.met(given, given[:, :0])
        return self.crossed(given, taken, fit)

    def counted(self) -> tuple[Any, ...]:
        sent = self.counts_on_host()
        got, fit = self.met(sent, sent)
        here = self.counts_on_device(got)
        return (*self.crossed(sent, got, fit), here, (sent, got))

    def met(self, given: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Put rows where they go. Then members tell each other so, and their counts."""
        fits = self.shared.put(self.rows, totals(given))
        mine = torch.cat([counts, counts.new_full((len(counts), 1), int(fits))], 1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.team)
        return theirs[:, :-1].contiguous(), bool(theirs[:, -1].all())

    def crossed(self, given: torch.Tensor, taken: torch.Tensor, fit: bool) -> Tensors:
        """By NCCL unless the rows of all members fit."""
        back = self.way == "back"
        if not fit:
            moved = (self.moved(r, given, taken) for r in self.rows)
            return tuple(r if back else by_expert(r, taken) for r in moved)
        parts = self.shared.come(self.rows, totals(given), totals(taken))
        found = tuple(torch.cat(r if back else expert_by_expert(r, taken)) for r in parts)
        self.shared.done()
        return found


@dataclass
class CudaComm(ProcessComm):
    """Processes with a GPU each, or a share of one."""

    has_added: bool = False  # whether the communicator of the loss and norm exists
    mailboxes: Mailboxes | None = None  # if processes share a GPU
    shared_groups: SharedGroups | None = None  # the same, for token all-to-alls

    def extend(self, needs: RequiredCommunicators) -> None:
        """Make the communicators in the same order on all processes, and use each of them once.

        NCCL sets up a communicator, and the connections of each kind of message, at their first
        use. The host then waits for its peers. If two processes set up two communicators in
        different orders, both hang.
        """
        self.backend, self.shares = "cpu:gloo,cuda:nccl", needs.shares
        new = [team for team in needs.teams if team not in self.groups]
        late = (
            set(needs.dynamic_links) - self.dynamic_links
        )  # now on a thread, with its own communicator
        super().extend(needs)
        self.share_mailboxes(needs)
        links = [link for link in needs.links if link in late or self.is_new(link)]
        for link in links:
            if link in self.groups:
                self.groups["before", link] = self.groups[link]
            self.groups[link] = self.group(link[0], link[1:], "nccl")
        if self.totals_key == TOTALS_STREAM and not self.has_added:
            self.has_added = True
            self.first_sum(self.groups[TOTALS_STREAM])
        for link in links:
            self.first_message(link)
        for team in new:
            if dist.get_rank() in team[1]:
                self.first_meeting(self.groups[team], len(team[1]))

    def share_mailboxes(self, needs: RequiredCommunicators) -> None:
        if are_used() and needs.links:
            self.mailboxes = self.mailboxes or Mailboxes(self.device)
            self.mailboxes.extend(needs.mailboxes)
        if are_used(for_tokens=True) and needs.teams:
            self.shared_groups = self.shared_groups or SharedGroups(self.device)
            self.shared_groups.extend(needs.token_bytes)

    def is_new(self, link: Link) -> bool:
        return link not in self.groups and not self.has_mailbox(link)

    def has_mailbox(self, link: Link) -> bool:
        shared = self.mailboxes is not None and link in self.mailboxes.links
        return shared and link not in self.dynamic_links

    def group(
        self, stream: str, devices: Group | None = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        exchanges = (stream, devices) in self.threads
        served = exchanges or (backend and devices and (stream, *devices) in self.dynamic_links)
        share = self.share_of_thread(stream) if served else share_of(self.shares, stream)
        if backend is not None:
            share = few_ctas(share)
        options = group_options(share, patience(), backend is not None or exchanges)
        ranks = devices and sorted(devices)
        return dist.new_group(ranks, backend=backend or self.backend, **options)

    def first_sum(self, everyone: dist.ProcessGroup | None) -> None:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=everyone)

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

    def all_to_all(
        self, rows: Tensors, where: Any, way: str, team: tuple[str, Group]
    ) -> TokenAllToAll:
        thread = self.threads[team]
        assert isinstance(thread, CudaExchangeThread)
        if way == "back":
            rows = tuple(by_source(r, where[1]) for r in rows)
        made = rows, where, way, self.groups[team], thread.counts_stream
        shared = self.shared_groups and self.shared_groups.groups.get(team)
        return SharedTokenAllToAll(*made, shared=shared) if shared else CudaTokenAllToAll(*made)

    def new_thread(self, name: str) -> ExchangeThread:
        return CudaExchangeThread(name, priority_of(self.share_of_thread(name)))

    def share_of_thread(self, stream: str) -> Share:
        """High priority, whatever the strategy says: such streams get hardware queues of their own.

        The host runs ahead of an exchange thread. In one queue with compute, an exchange could end
        up behind a wait for a message that peers send only after this exchange: a deadlock.
        """
        return replace(share_of(self.shares, stream), priority=HIGH)

    def arrival(
        self, shapes: Sequence[Shape], peer: int, stream: str, into: Tensors | None
    ) -> Arrival:
        link = stream, peer, dist.get_rank()
        if self.mailboxes is None or not self.has_mailbox(link):
            return super().arrival(shapes, peer, stream, into)
        inbox = self.mailboxes.inboxes[link]
        places = [inbox.next() for _ in shapes]
        return Delivery(inbox, lambda: into or self.room_for(shapes), places)

    def isend(self, tensor: torch.Tensor, peer: int, stream: str) -> Handle:
        if tensor.device.type == "cpu":  # sizes, which the host needs
            return super().isend(tensor, peer, stream)
        link = stream, dist.get_rank(), peer
        if self.mailboxes is not None and self.has_mailbox(link):
            return self.mailboxes.outboxes[link].send(tensor)
        work = dist.isend(tensor, peer, group=self.groups[link])
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


class CudaExchangeThread(ExchangeThread):
    """An exchange thread whose tasks alternate between two CUDA streams of its own.

    While one message is in flight, the rows of the message before it are sorted. Messages stay in
    order: in one communicator, NCCL starts a message only after the one before it has ended,
    whatever streams they are on.
    """

    def __init__(self, name: str, priority: int = 0) -> None:
        self.device = torch.cuda.current_device()
        self.streams = cycle([torch.cuda.Stream(priority=priority) for _ in range(2)])
        self.counts_stream = torch.cuda.Stream(priority=priority)
        pin_counts()
        super().__init__(name)

    def submit(self, job: Callable[[], Any]) -> Task:
        """Start after everything queued so far. `wait` makes the current stream wait."""
        compute = torch.cuda.current_stream()
        task = super().submit(partial(self.on_stream, job, compute.record_event(), compute))
        return CudaTask(task.job, task.done)

    def on_stream(
        self, job: Callable[[], Any], ready: torch.cuda.Event, compute: torch.cuda.Stream
    ) -> tuple[Any, torch.cuda.Event]:
        torch.cuda.set_device(self.device)
        stream = next(self.streams)
        with torch.cuda.stream(stream):
            if isinstance(job, CudaTokenAllToAll):
                job.prepare()
            ready.synchronize()  # on the host: a queued wait would block its whole hardware queue
            found = job()
            for tensor in tensors_in(found):
                tensor.record_stream(compute)
            return found, stream.record_event()


@cache
def pin_counts() -> None:
    """Pin memory for the counts of any number of experts before the first step.

    Pinning memory may wait for the GPU, and during a step the GPU may wait for messages.
    """
    several = 4  # exchanges whose counts are in flight at once
    sizes = [2**k for k in range(11)] * several
    held = [torch.empty(size, dtype=torch.int64, pin_memory=True) for size in sizes]
    held.clear()  # torch caches pinned memory


class CudaTask(Task):
    """A task on a GPU. `wait` makes the current stream wait for its result."""

    def wait(self) -> Any:
        found, event = self.done.result()
        torch.cuda.current_stream().wait_event(event)
        return found


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    leaves: Sequence[Any] = pytree.tree_leaves(found)
    return (one for one in leaves if isinstance(one, torch.Tensor) and one.is_cuda)
