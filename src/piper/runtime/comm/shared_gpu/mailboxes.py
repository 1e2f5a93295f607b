"""Which links of a process have mailboxes: all ends agree before the first message."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from piper.plan.analyse.mailbox_sizes import Link, MailboxSize
from piper.runtime.comm.shared_gpu.mailbox import Mailbox, Outbox
from piper.runtime.hardware import SHARED
from piper.runtime.processes.gathering import everyone
from piper.runtime.torch_private import opened_memory, shared_memory

CHOICE = "PIPER_MAILBOXES"  # 0: processes that share a GPU talk through NCCL, as others do
ONLY_LINKS = "links"  # token all-to-alls use NCCL
WHAT = "the sharing of mailboxes"
Offer = tuple[Link, int, tuple[Any, ...]]  # slots, and how to open their memory; (): not at all


def are_used(for_tokens: bool = False) -> bool:
    """Whether processes use each other's memory: for links, or for token all-to-alls, too."""
    others = ("0", ONLY_LINKS) if for_tokens else ("0",)
    return SHARED in os.environ and os.environ.get(CHOICE) not in others and dist.is_initialized()


@dataclass
class Mailboxes:
    """Both kinds of ends that are in this process."""

    device: torch.device
    inboxes: dict[Link, Mailbox] = field(default_factory=dict)
    outboxes: dict[Link, Outbox] = field(default_factory=dict)
    links: set[Link] = field(default_factory=set)  # of all processes

    def extend(self, sizes: Mapping[Link, MailboxSize]) -> None:
        """Make what is missing or too small. Every process calls it, while none has messages."""
        small = [link for link, size in sizes.items() if not self.fits(link, size)]
        made = {link: Mailbox.of(self.enlarged(link, sizes[link]), self.device) for link in small}
        torch.cuda.synchronize()
        offers = [offer for some in everyone([*offered(made)], WHAT) for offer in some]
        mine = {link: (slots, how) for link, slots, how in offers if link[1] == dist.get_rank()}
        opened = {link: box for link, how in mine.items() if (box := open_box(*how)) is not None}
        failed = {link for some in everyone(sorted({*mine} - {*opened}), WHAT) for link in some}
        self.inboxes |= made
        for link, box in opened.items():
            self.outboxes[link] = Outbox(box, torch.cuda.Stream(self.device, priority=-1))
        self.links = (self.links | {link for link, _, _ in offers}) - failed

    def fits(self, link: Link, size: MailboxSize) -> bool:
        return link in self.links and self.inboxes[link].fits(size)

    def enlarged(self, link: Link, size: MailboxSize) -> MailboxSize:
        """No smaller than before: other programs use the link, too."""
        if link not in self.inboxes:
            return size
        slots, width = self.inboxes[link].slots.shape
        return MailboxSize(max(slots, size.slots), max(width, size.slot_bytes))


def offered(made: Mapping[Link, Mailbox]) -> Iterable[Offer]:
    for link, box in made.items():
        try:
            yield link, len(box.slots), shared_memory(box.slots)
        except RuntimeError:  # this machine or allocator cannot share memory: NCCL can do it
            yield link, len(box.slots), ()


def open_box(slots: int, how: tuple[Any, ...]) -> Mailbox | None:
    try:
        return Mailbox.on(opened_memory(how), slots) if how else None
    except RuntimeError:
        return None
