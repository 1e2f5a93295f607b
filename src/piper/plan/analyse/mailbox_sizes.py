"""How much memory a device sets aside for messages that other processes copy into it.

A tensor needs a slot of its link's mailbox from when its receive starts until an instruction waits
for it. If there are slots for all tensors that are in that state at once, a sender waits for a
slot at most until the receive starts, as it would without a mailbox. So plans that were proved
free of deadlocks stay so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from piper.names import Device
from piper.plan.instructions import Plan, Recv
from piper.plan.instructions.sizes import shape_bytes

Link = tuple[str, Device, Device]  # a stream, sender, receiver


@dataclass(frozen=True, slots=True)
class MailboxSize:
    """The slots of one link, all of the same size."""

    slots: int
    slot_bytes: int


def mailbox_sizes(plan: Plan) -> dict[Link, MailboxSize]:
    """By link to this device. Messages whose sizes depend on data do not go into mailboxes."""
    found = dict[Link, Occupied]()
    for k, one in enumerate(plan.instructions):
        for awaited in one.waits:
            for link in found.values():
                link.untaken.pop(awaited, None)
        if isinstance(one, Recv) and one.fixed:
            found.setdefault((one.stream, one.peer, plan.device), Occupied()).add(k, one)
    return {link: MailboxSize(one.most, one.largest) for link, one in found.items()}


@dataclass
class Occupied:
    """The slots of a link while a plan runs. They are used in turn."""

    untaken: dict[int, int] = field(default_factory=dict)  # by receive: its first tensor's number
    count: int = 0
    most: int = 0
    largest: int = 0

    def add(self, k: int, recv: Recv) -> None:
        """From the oldest tensor that nobody has taken on, every tensor needs its own slot."""
        self.untaken[k] = self.count
        self.count += len(recv.shapes)
        self.most = max(self.most, self.count - min(self.untaken.values()))
        self.largest = max((self.largest, *map(shape_bytes, recv.shapes)))
