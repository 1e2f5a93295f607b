"""Rows of token all-to-alls between processes that share a GPU: copies into each other's memory.

Each member of a group shares two slots for each member that may send to it. A member copies rows
into the slots of the others, and its host waits until the copies are done. Then all members
exchange a message on the host, which says so, and take the rows out of their own slots. The next
message says that these are taken, so the rows after it may use the same slots. No stream waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from piper.plan.analyse.required_communicators import Team
from piper.runtime.processes.gathering import everyone
from piper.runtime.torch_private import opened_memory, shared_memory

ALIGNED = 256  # bytes
SLOTS = 2
WHAT = "the sharing of memory for tokens"
Tensors = Sequence[torch.Tensor]
Offer = tuple[Team, int, tuple[Any, ...]]  # whose memory, and how to open it; (): not at all


@dataclass
class SharedRows:
    """The memory of a group: of each member, [members that send, slots, bytes]."""

    here: int  # which member this process is
    memory: list[torch.Tensor]  # by member
    turn: int = 0
    taken: torch.cuda.Event | None = None  # after the last rows were taken

    @property
    def slot_bytes(self) -> int:
        return self.memory[self.here].shape[-1]

    def put(self, rows: Tensors, counts: Sequence[int]) -> bool:
        """Copy rows to the members that they go to. If there are too many, nothing is copied."""
        self.turn += 1
        pieces = list(zip(*(one.split([*counts]) for one in rows), strict=True))
        fits = all(needed(some) <= self.slot_bytes for some in pieces)
        for member, some in enumerate(pieces):
            if fits and member != self.here:
                slot = self.memory[member][self.here, self.turn % SLOTS]
                for piece, into in zip(some, views(slot, some, counts[member]), strict=True):
                    into.copy_(piece)
        torch.cuda.current_stream().synchronize()
        if self.taken is not None:
            self.taken.synchronize()
        return fits

    def come(
        self, rows: Tensors, given: Sequence[int], counts: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        """For each tensor, the rows from each member: views of slots, and of what was kept."""
        slots = [self.memory[self.here][member, self.turn % SLOTS] for member in range(len(counts))]
        found = [list(views(slot, rows, count)) for slot, count in zip(slots, counts, strict=True)]
        found[self.here] = [one.split([*given])[self.here] for one in rows]
        return [list(one) for one in zip(*found, strict=True)]

    def done(self) -> None:
        """Everything that reads slots is queued on the current stream."""
        self.taken = torch.cuda.current_stream().record_event()


def padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def needed(pieces: Tensors) -> int:
    return sum(padded(piece.nbytes) for piece in pieces)


def views(slot: torch.Tensor, like: Tensors, count: int) -> Iterator[torch.Tensor]:
    """The memory of a slot as `count` rows of each tensor, one tensor after the other."""
    first = 0
    for one in like:
        shape = (count, *one.shape[1:])
        size = prod(shape) * one.element_size()
        yield slot[first : first + size].view(one.dtype).view(shape)
        first += padded(size)


@dataclass
class SharedGroups:
    """The groups of this process whose members share memory. All members agree on them."""

    device: torch.device
    groups: dict[Team, SharedRows] = field(default_factory=dict)

    def extend(self, mine: Mapping[Team, int]) -> None:
        """Make what is missing or too small, by bytes of rows. Every process calls it."""
        here, wanted = dist.get_rank(), agreed(mine)
        if not wanted:
            return
        sizes = {team: slot_bytes(team, most) for team, most in wanted if here in team[1]}
        made = {team: self.block(team, size) for team, size in sizes.items()}
        made = {team: block for team, block in made.items() if block is not None}
        torch.cuda.synchronize()
        offers = [offer for some in everyone([*offered(made)], WHAT) for offer in some]
        found = {team: opened(team, block, offers) for team, block in made.items()}
        failed = [team for team, group in found.items() if group is None]
        failed = [team for some in everyone(failed, WHAT) for team in some]
        for team, group in found.items():
            self.groups.pop(team, None)
            if group is not None and team not in failed:
                self.groups[team] = group

    def block(self, team: Team, size: int) -> torch.Tensor | None:
        """New memory of this member, unless what there is suffices."""
        if not size or (team in self.groups and self.groups[team].slot_bytes >= size):
            return None
        count = in_all(team, size)
        memory = torch.zeros(count, dtype=torch.uint8, device=self.device)
        return memory.view(len(team[1]), SLOTS, size)


def offered(made: Mapping[Team, torch.Tensor]) -> Iterator[Offer]:
    for team, block in made.items():
        try:
            yield team, dist.get_rank(), shared_memory(block)
        except RuntimeError:  # this machine or allocator cannot share memory: NCCL can do it
            yield team, dist.get_rank(), ()


def opened(team: Team, mine: torch.Tensor, offers: Iterable[Offer]) -> SharedRows | None:
    """The memory of all members; None if one cannot be opened here."""
    how = {rank: way for one, rank, way in offers if one == team}
    here, members = dist.get_rank(), sorted(team[1])
    if not all(how.get(rank) for rank in members):
        return None
    try:
        memory = [mine if r == here else opened_memory(how[r]).view(mine.shape) for r in members]
    except RuntimeError:
        return None
    return SharedRows(members.index(here), memory)


def slot_bytes(team: Team, size: int) -> int:
    """Room for twice the rows of an even spread. More than all rows never go to one member."""
    return padded(min(size, -(-2 * size // len(team[1]))))


def in_all(team: Team, slot: int) -> int:
    """Bytes that one member shares: slots for each member."""
    return len(team[1]) * SLOTS * slot


def group_bytes(team: Team, size: int) -> int:
    """The same, if a member sends so many bytes of rows at once."""
    return in_all(team, slot_bytes(team, size))


def agreed(mine: Mapping[Team, int]) -> list[tuple[Team, int]]:
    """The most bytes that a member of each group sends at once."""
    found = dict[Team, int]()
    for wanted in everyone(sorted(mine.items()), WHAT):
        for team, size in wanted:
            found[team] = max(found.get(team, 0), size)
    return sorted(found.items())
