"""Messages through mailboxes. Threads take the part of processes, and of streams of a GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from random import Random
from typing import Any

import pytest
import torch

from piper.plan.analyse.mailbox_sizes import Link, MailboxSize
from piper.runtime.comm.shared_gpu import mailbox, mailboxes
from piper.runtime.comm.shared_gpu.mailbox import Delivery, Mailbox
from piper.runtime.comm.shared_gpu.mailboxes import Mailboxes
from piper.runtime.hardware import SHARED, chosen_device

SIZE = MailboxSize(slots=3, slot_bytes=1000)
LINK: Link = ("pp", 0, 1)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits and writes of numbers, as a stream does them, by the thread itself."""

    def number(address: int) -> Any:
        return ctypes.c_int32.from_address(address)

    def wait(address: int, least: int) -> None:
        end = time.monotonic() + 20
        while number(address).value < least:
            assert time.monotonic() < end, "nobody writes the number"
            time.sleep(0)

    def write(address: int, value: int) -> None:
        number(address).value = value

    monkeypatch.setattr(mailbox, "wait_for_value", wait)
    monkeypatch.setattr(mailbox, "write_value", write)


def drawn(random: Random, k: int) -> torch.Tensor:
    shape = [random.randint(0, 5) for _ in range(random.randint(1, 3))]
    dtype = random.choice([torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64])
    return torch.full(shape, k % 2 if dtype == torch.bool else k % 100, dtype=dtype)


def both_ends(size: MailboxSize = SIZE) -> tuple[Mailbox, Mailbox]:
    inbox = Mailbox.of(size, torch.device("cpu"))
    shared = torch.empty(0, dtype=torch.uint8).set_(inbox.slots.untyped_storage())
    return inbox, Mailbox.on(shared, size.slots)


@pytest.mark.parametrize("seed", range(4))
def test_tensors_arrive_whole_and_in_order_whoever_is_faster(memory: None, seed: int) -> None:
    random = Random(seed)
    sent = [drawn(random, k) for k in range(200)]
    slow_sender = {random.randrange(200) for _ in range(5)}
    slow_receiver = {random.randrange(200) for _ in range(5)}
    inbox, outbox = both_ends()

    def send() -> None:
        for k, tensor in enumerate(sent):
            time.sleep(0.005 if k in slow_sender else 0)
            outbox.put(tensor)

    sender = threading.Thread(target=send)
    sender.start()
    for k, tensor in enumerate(sent):
        time.sleep(0.005 if k in slow_receiver else 0)
        place = inbox.next()
        delivery = Delivery(inbox, lambda like=tensor: (torch.empty_like(like),), [place])
        (found,) = delivery.wait()
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    sender.join()


def test_a_message_may_be_taken_before_an_earlier_one(memory: None) -> None:
    inbox, outbox = both_ends()
    outbox.put(torch.tensor([1.0]))
    outbox.put(torch.tensor([2.0, 3.0]))
    first, second = inbox.next(), inbox.next()
    later, earlier = torch.empty(2), torch.empty(1)

    inbox.take(*second, later)
    inbox.take(*first, earlier)

    assert later.tolist() == [2, 3] and earlier.tolist() == [1]


def test_a_sender_waits_until_its_slot_is_empty(memory: None) -> None:
    inbox, outbox = both_ends(MailboxSize(1, 8))
    outbox.put(torch.tensor([1.0]))
    second = threading.Thread(target=outbox.put, args=(torch.tensor([2.0]),))
    second.start()
    time.sleep(0.05)
    assert second.is_alive()

    into = torch.empty(1)
    inbox.take(*inbox.next(), into)
    second.join()
    assert into.item() == 1


@pytest.mark.parametrize(
    ("shared", "choice", "links", "tokens"),
    [
        (False, None, False, False),  # a GPU each
        (True, None, True, True),
        (True, "links", True, False),
        (True, "0", False, False),
    ],
)
def test_only_processes_that_share_a_gpu_have_mailboxes(
    monkeypatch: pytest.MonkeyPatch, shared: bool, choice: str | None, links: bool, tokens: bool
) -> None:
    monkeypatch.setattr(mailboxes.dist, "is_initialized", lambda: True)
    for name, value in ((SHARED, "1" if shared else None), (mailboxes.CHOICE, choice)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    assert mailboxes.are_used() == links
    assert mailboxes.are_used(for_tokens=True) == tokens


@pytest.mark.parametrize("shared", [False, True])
def test_processes_that_share_a_gpu_are_all_on_the_first(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):  # set, to be put back
        monkeypatch.setenv(name, "")
    if shared:
        monkeypatch.setenv(SHARED, "1")

    assert chosen_device("cuda").index == (0 if shared else 3)


class Ends:
    """Two processes that share mailboxes, as threads."""

    def __init__(self, patch: pytest.MonkeyPatch, refuses: bool = False) -> None:
        self.here, self.met = threading.local(), threading.Barrier(2)
        self.brought: list[Any] = [None, None]
        self.memory: dict[int, torch.Tensor] = {}
        self.refuses, self.keeps = refuses, False
        self.ends = [Mailboxes(torch.device("cpu")) for _ in range(2)]
        patch.setattr(mailboxes.dist, "get_rank", lambda: self.here.rank)
        patch.setattr(mailboxes, "everyone", self.everyone)
        patch.setattr(mailboxes, "shared_memory", self.shared)
        patch.setattr(mailboxes, "opened_memory", self.opened)
        patch.setattr(mailboxes, "Outbox", lambda box, stream: box)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device, priority: None)

    def everyone(self, mine: Any, what: str) -> list[Any]:
        self.brought[self.here.rank] = mine
        self.met.wait()
        found = list(self.brought)
        self.met.wait()
        return found

    def shared(self, tensor: torch.Tensor) -> tuple[int]:
        if self.keeps:
            raise RuntimeError("this allocator does not share memory")
        self.memory[len(self.memory)] = tensor
        return (len(self.memory) - 1,)

    def opened(self, how: tuple[int]) -> torch.Tensor:
        if self.refuses:
            raise RuntimeError("cudaIpcOpenMemHandle: invalid device context")
        memory = self.memory[how[0]].untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(memory)

    def extend(self, size: MailboxSize) -> None:
        def one(rank: int) -> None:
            self.here.rank = rank
            self.ends[rank].extend({LINK: size} if rank == LINK[2] else {})

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_both_ends_know_the_links_and_share_the_memory(
    monkeypatch: pytest.MonkeyPatch, memory: None
) -> None:
    both = Ends(monkeypatch)
    both.extend(SIZE)
    sender, receiver = both.ends
    assert sender.links == receiver.links == {LINK}

    sender.outboxes[LINK].put(torch.tensor([5.0]))  # type: ignore[attr-defined]
    into = torch.empty(1)
    receiver.inboxes[LINK].take(0, 0, into)
    assert into.item() == 5


def test_a_mailbox_that_is_too_small_is_replaced_on_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Ends(monkeypatch)
    both.extend(SIZE)
    first = both.ends[1].inboxes[LINK]
    both.extend(MailboxSize(2, 100))
    assert both.ends[1].inboxes[LINK] is first

    both.extend(MailboxSize(2, 5000))

    sender, receiver = both.ends
    slots = receiver.inboxes[LINK].slots
    assert slots.shape[0] == SIZE.slots and slots.shape[1] >= 5000
    outbox: Any = sender.outboxes[LINK]
    assert outbox.slots.data_ptr() == slots.data_ptr() and outbox.count == 0


def test_a_link_whose_memory_cannot_be_opened_has_no_mailbox_on_either_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Ends(monkeypatch, refuses=True)
    both.extend(SIZE)
    assert not both.ends[0].links and not both.ends[1].links


def test_a_link_whose_larger_mailbox_cannot_be_shared_has_none_on_either_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the sender would go on with the old one, and the receiver with the new one."""
    both = Ends(monkeypatch)
    both.extend(SIZE)
    both.keeps = True
    both.extend(MailboxSize(2, 5000))
    assert not both.ends[0].links and not both.ends[1].links
