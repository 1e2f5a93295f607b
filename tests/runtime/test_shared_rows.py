"""Token all-to-alls through shared memory. Threads take the part of processes of one GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from draws import one_of

from piper.runtime.comm.nccl import SharedTokenAllToAll
from piper.runtime.comm.shared_gpu import shared_rows
from piper.runtime.comm.shared_gpu.shared_rows import SharedGroups, SharedRows, slot_bytes
from piper.runtime.comm.token_routes import by_source

WAYS, EXPERTS, ROWS = 3, 2, 12  # members, experts of each, rows of each
WIDE = 64  # numbers of a row, 256 bytes
EP = ("ep", (0, 1, 2))


class Stream:
    """A stream that runs everything at once, and notes who waits for it."""

    def synchronize(self) -> None:
        pass

    def record_event(self) -> Stream:
        return self


class Members:
    """The members of a group. Their hosts meet in all-to-alls."""

    def __init__(self, patch: pytest.MonkeyPatch, ways: int = WAYS) -> None:
        self.here, self.met = threading.local(), threading.Barrier(ways, timeout=20)
        self.ways, self.by_nccl, self.refused = ways, 0, set[int]()
        self.brought: list[Any] = [None] * ways
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        patch.setattr(torch.cuda, "stream", lambda stream: threading.Lock())
        patch.setattr(dist, "get_rank", lambda: self.here.rank)
        patch.setattr(dist, "get_world_size", lambda group: ways)
        patch.setattr(dist, "all_to_all_single", self.all_to_all)

    def everyone(self, mine: Any, what: str = "") -> list[Any]:
        self.brought[self.here.rank] = mine
        self.met.wait()
        found = list(self.brought)
        self.met.wait()
        return found

    def all_to_all(
        self, into: torch.Tensor, given: torch.Tensor, take: Any = None, give: Any = None, **_: Any
    ) -> None:
        """As torch's: for messages on the host, and for the rows that go by NCCL."""
        even = [len(given) // self.ways] * self.ways
        self.by_nccl += give is not None
        parts = self.everyone(given.split(give or even))
        into.copy_(torch.cat([one[self.here.rank] for one in parts]))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each member finds. The failure of one is that of all."""

        def one(rank: int) -> Any:
            self.here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self.met.abort()
                raise

        with ThreadPoolExecutor(self.ways) as pool:
            running = [pool.submit(one, rank) for rank in range(self.ways)]
        failed = [error for task in running if (error := task.exception())]
        for error in sorted(failed, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error
        return [task.result() for task in running]


class Slow(SharedRows):
    """Takes its time, now and then, before it takes rows."""

    def come(self, *args: Any) -> list[list[torch.Tensor]]:
        time.sleep(0.003 * ((self.turn + self.here) % 3))
        return super().come(*args)


def memories(bytes_of_slot: int) -> list[SharedRows]:
    shape = WAYS, shared_rows.SLOTS, bytes_of_slot
    blocks = [torch.zeros(shape, dtype=torch.uint8) for _ in range(WAYS)]
    return [Slow(member, blocks) for member in range(WAYS)]


def drawn_counts(random: Random) -> list[list[int]]:
    """How many rows each member has for each expert."""
    experts = WAYS * EXPERTS
    drawn = [[random.randrange(experts) for _ in range(ROWS)] for _ in range(WAYS)]
    return [[one.count(expert) for expert in range(experts)] for one in drawn]


def drawn_rows(turn: int, member: int) -> tuple[torch.Tensor, ...]:
    """Two tensors, sorted by expert. Every number is there once."""
    first = 1000 * turn + 100 * member + torch.arange(ROWS)
    wide = first[:, None] * 10 + torch.arange(WIDE)
    return wide.to(torch.float32), (first[:, None] + torch.arange(3)).to(torch.int16)


def expected(turn: int, counts: list[list[int]], member: int, tensor: int) -> torch.Tensor:
    """The rows of a member's experts, expert by expert, each from the first member on."""
    found = []
    for expert in range(member * EXPERTS, (member + 1) * EXPERTS):
        for source in range(WAYS):
            first = sum(counts[source][:expert])
            rows = drawn_rows(turn, source)[tensor]
            found.append(rows[first : first + counts[source][expert]])
    return torch.cat(found)


@one_of(2)
@pytest.mark.parametrize("held", [ROWS, 6])  # rows of a slot; six are too few at times
@pytest.mark.parametrize("seed", range(3))
def test_rows_arrive_sorted_and_come_back_whoever_is_faster(
    monkeypatch: pytest.MonkeyPatch, seed: int, held: int
) -> None:
    random = Random(seed)
    members, turns = Members(monkeypatch), 12
    counts = [drawn_counts(random) for _ in range(turns)]
    shared = memories(256 * (held + 1))

    def work(rank: int) -> None:
        for turn in range(turns):
            rows = drawn_rows(turn, rank)
            mine = torch.tensor(counts[turn][rank])
            *there, here, route = made(rows, mine, "counted", shared[rank])()
            for k, found in enumerate(there):
                assert torch.equal(found, expected(turn, counts[turn], rank, k))
            assert len(there[0]) == int(here.sum())
            again = made(rows, route, "out", shared[rank])()
            assert all(map(torch.equal, again, there))
            by_member = tuple(by_source(one, route[1]) for one in there)
            back = made(by_member, route, "back", shared[rank])()
            assert all(map(torch.equal, back, rows))

    members.run(work)
    assert (0 < members.by_nccl < 6 * WAYS * turns) == (held < ROWS)
    assert held < ROWS or not members.by_nccl


def made(rows: Any, where: Any, way: str, shared: SharedRows) -> SharedTokenAllToAll:
    return SharedTokenAllToAll(rows, where, way, None, None, shared=shared)  # type: ignore[arg-type]


class Waits:
    """Notes the order of waits on the host."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def synchronize(self) -> None:
        self.seen.append("copies")

    def record_event(self) -> Any:
        return Taken(self.seen)


class Taken:
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def synchronize(self) -> None:
        self.seen.append("taken")


def test_before_members_meet_rows_are_copied_and_the_last_ones_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise rows would be read too early, or overwritten by those after the next."""
    stream = Waits()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    block = torch.zeros(2, shared_rows.SLOTS, 256, dtype=torch.uint8)
    shared, rows = SharedRows(0, [block, block.clone()]), (torch.ones(2, 1),)

    shared.put(rows, [1, 1])
    shared.done()
    shared.put(rows, [1, 1])

    assert stream.seen == ["copies", "copies", "taken"]


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Members:
    """Members whose memory is opened by number."""
    members, known = Members(monkeypatch), list[torch.Tensor]()

    def shared(tensor: torch.Tensor) -> tuple[int]:
        known.append(tensor)
        return (next(k for k, one in enumerate(known) if one is tensor) + 1,)

    def opened(how: tuple[int]) -> torch.Tensor:
        if how[0] in members.refused:
            raise RuntimeError("cudaIpcOpenMemHandle: invalid device context")
        return known[how[0] - 1].view(-1)

    monkeypatch.setattr(shared_rows, "everyone", members.everyone)
    monkeypatch.setattr(shared_rows, "shared_memory", shared)
    monkeypatch.setattr(shared_rows, "opened_memory", opened)
    return members


def extended(members: Members, groups: list[SharedGroups], sizes: list[int]) -> None:
    def work(rank: int) -> None:
        groups[rank].extend({EP: sizes[rank]} if sizes[rank] else {})

    members.run(work)


def test_members_agree_on_the_largest_size_and_see_one_memory(sharing: Members) -> None:
    groups = [SharedGroups(torch.device("cpu")) for _ in range(WAYS)]
    extended(sharing, groups, [3000, 6000, 3000])
    first = [one.groups[EP] for one in groups]
    assert {one.slot_bytes for one in first} == {slot_bytes(EP, 6000)} == {4096}
    assert [one.here for one in first] == [0, 1, 2]
    for other in first[1:]:
        same = zip(first[0].memory, other.memory, strict=True)
        assert all(a.data_ptr() == b.data_ptr() for a, b in same)

    extended(sharing, groups, [100, 100, 100])
    assert [one.groups[EP] for one in groups] == first

    extended(sharing, groups, [9000, 100, 100])
    assert {one.groups[EP].slot_bytes for one in groups} == {6144}


def test_if_one_member_cannot_open_memory_no_member_uses_it(sharing: Members) -> None:
    groups = [SharedGroups(torch.device("cpu")) for _ in range(WAYS)]
    extended(sharing, groups, [3000] * WAYS)
    sharing.refused = {WAYS + 1}  # the first that is shared from now on; its owner need not open it

    extended(sharing, groups, [9000] * WAYS)

    assert not any(one.groups for one in groups)


def test_a_job_without_token_all_to_alls_shares_nothing(sharing: Members) -> None:
    groups = [SharedGroups(torch.device("cpu")) for _ in range(WAYS)]
    extended(sharing, groups, [0] * WAYS)
    assert not any(one.groups for one in groups)
