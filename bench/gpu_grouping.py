"""Adjacent sends and receives as one NCCL group: group `grouped` of bench/gpu.py.

    piper run -n 4 --share-gpu bench/gpu.py --group grouped --size large

Piper issues every message on its own, and each direction between two devices has its own
communicator. Here, a send and a receive between the same two devices with no computation between
them become one group, which NCCL runs as one kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_arena import Arena, Contender
from gpu_peers import SCHEDULES, pipelined

import piper
from piper.names import Share
from piper.plan.instructions import Add, Free, Instruction, Keep, Load, Plan, Recv, Send
from piper.runtime.comm.stream_shares import few_ctas, group_options
from piper.runtime.processes.world import patience

Message = Send | Recv


def held(instructions: Sequence[Instruction]) -> Iterator[bool]:
    """For each message, in order: whether it starts together with the next one."""
    before: tuple[int, Message] | None = None  # a message that may get a partner
    for at, one in enumerate(instructions):
        if isinstance(one, Send | Recv):
            pair = before is not None and are_partners(before[1], one)
            if before is not None:
                yield pair
            before = None if pair else (at, one)
            if pair:
                yield False
        elif before is not None and not (is_light(one) and before[0] not in one.waits):
            yield False
            before = None
    if before is not None:
        yield False


def are_partners(one: Message, other: Message) -> bool:
    return one.peer == other.peer and type(one) is not type(other)


def is_light(one: Instruction) -> bool:
    return isinstance(one, Add | Free | Keep | Load)


@dataclass
class Batch:
    """Messages that start together. A wait is for all of them."""

    operations: list[Any] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)

    def start(self) -> None:
        """Also a single message is a batch: other messages of NCCL have another communicator."""
        self.works = dist.batch_isend_irecv(self.operations)

    def wait(self) -> None:
        """Once is enough: what was queued after it waits, too. On gloo, a second wait hangs."""
        for work in self.works:
            work.wait()
        self.works = []


Key = tuple[int, int, int]  # sender, receiver, and the how-many-th of a step between them


def keys(plan: Plan) -> Iterator[Key]:
    """The messages of a plan, by names that both ends know."""
    seen: Counter[tuple[int, int]] = Counter()
    for one in messages(plan):
        ends = (plan.device, one.peer) if isinstance(one, Send) else (one.peer, plan.device)
        yield (*ends, seen[ends])
        seen[ends] += 1


class Grouped:
    """Starts the messages of one Trainer, some of them together.

    A message that is grouped at one end uses the communicator of both directions at both ends.
    Others keep the communicator of their direction. With one for all, most schedules would hang.
    """

    def __init__(self, arena: Arena, comm: Any, plan: Plan) -> None:
        self.comm, self.rank = comm, arena.rank
        self.marks, self.keys = list(held(plan.instructions)), list(keys(plan))
        self.alone = comm.isend, comm.irecv
        mine = [k for at, k in enumerate(self.keys) if self.marks[at] or at and self.marks[at - 1]]
        self.paired = everybodys(mine)
        self.pairs = {pair: communicator(arena, pair) for pair in pairs_of(self.paired)}
        for pair in (pair for pair in self.pairs if arena.rank in pair):
            self.meet(arena, pair)
        self.at, self.open = 0, Batch()

    def meet(self, arena: Arena, pair: tuple[int, int]) -> None:
        """NCCL connects at the first message."""
        tensor = torch.zeros(1, device=arena.device)
        for sender in pair:
            way = dist.isend if sender == self.rank else dist.irecv
            first = dist.P2POp(way, tensor, sum(pair) - self.rank, self.pairs[pair])
            for work in dist.batch_isend_irecv([first]):
                work.wait()

    def isend(self, tensor: torch.Tensor, peer: int, stream: str) -> Any:
        return self.issue(0, tensor, peer, stream)

    def irecv(self, tensor: torch.Tensor, peer: int, stream: str) -> Any:
        return self.issue(1, tensor, peer, stream)

    def issue(self, way: int, tensor: torch.Tensor, peer: int, stream: str) -> Any:
        at, self.at = self.at, (self.at + 1) % len(self.marks)
        if self.keys[at] not in self.paired:
            return self.alone[way](tensor, peer, stream)
        group = self.pairs[min(self.rank, peer), max(self.rank, peer)]
        way_of = (dist.isend, dist.irecv)[way]
        batch = self.open
        batch.operations.append(dist.P2POp(way_of, tensor, peer, group))
        if not self.marks[at]:
            batch.start()
            self.open = Batch()
        return batch


def messages(plan: Plan) -> list[Message]:
    return [one for one in plan.instructions if isinstance(one, Send | Recv)]


def everybodys(mine: list[Key]) -> set[Key]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {key for one in found for key in one}


def pairs_of(paired: set[Key]) -> list[tuple[int, int]]:
    """In the same order on all ranks."""
    return sorted({(min(a, b), max(a, b)) for a, b, _ in paired})


def communicator(arena: Arena, pair: tuple[int, int]) -> Any:
    if not arena.on_gpu:
        return dist.new_group(list(pair), backend="gloo")
    options = group_options(few_ctas(Share("pp")), patience(), True)
    return dist.new_group(list(pair), backend="nccl", **options)


def together(arena: Arena, make: Callable[[], Contender]) -> Contender:
    one = make()
    assert one.trainer is not None
    programs = one.trainer._programs
    plan = next(iter(programs.ready.values())).plan
    comm: Any = programs.comm
    mine = Grouped(arena, comm, plan)
    comm.isend, comm.irecv = mine.isend, mine.irecv
    counts = [int(arena.everywhere(x)[1]) for x in (sum(mine.marks), len(mine.marks))]
    arena.say(f"  {counts[0]} groups of two among {counts[1]} messages of rank 1")
    return one


def grouped(arena: Arena) -> None:
    """Three schedules over all ranks, beside torch's."""
    size, parts = arena.size, arena.chosen.microbatches or 8
    data = size.batch(parts=parts)
    for name in ("1f1b", "dualpipev", "interleaved-1f1b"):
        model = arena.shelf.get(size, arena.world * SCHEDULES[name][1])
        strategy = piper.strategies.BUILDERS[name](pp=arena.world, microbatches=parts)
        ours: Any = partial(arena.ours, model, strategy, data)
        makers: dict[str, Any] = {
            "piper": ours,
            "piper grouped": partial(together, arena, ours),
            "torch": partial(pipelined, arena, name, model, data, parts, arena.world),
        }
        if arena.on_gpu:
            graphs = partial(ours, graphs=True)
            makers["piper graphs"] = graphs
            makers["piper graphs grouped"] = partial(together, arena, graphs)
        pairs = [(a, "torch") for a in makers if a != "torch"]
        pairs += [(a, a.removesuffix(" grouped")) for a in makers if a.endswith("grouped")]
        arena.contest(f"grouped {name}", makers, pairs)
