"""Messages between processes that share a GPU: copies into memory that the receiver shares.

NCCL takes such processes for hosts. A message would cross a socket; a thread, and on the GPU some
SMs, would wait for it. Here the sender copies a tensor into a slot of the receiver's mailbox. Both
wait in their streams for numbers in GPU memory: how often a slot was filled, and emptied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from piper.plan.analyse.mailbox_sizes import MailboxSize
from piper.runtime.comm.shared_gpu.stream_values import wait_for_value, write_value

ALIGNED = 256  # bytes
View = tuple[int, torch.Size, torch.dtype]  # of a slot


@dataclass
class Mailbox:
    """One end of a link. Both ends count its tensors, and so agree on the slots."""

    slots: torch.Tensor  # [slots, bytes]
    turns: torch.Tensor  # [2, slots], int32: how often each slot was filled, and emptied
    count: int = 0
    views: dict[View, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, size: MailboxSize, device: torch.device) -> Mailbox:
        width = -(-max(size.slot_bytes, 1) // ALIGNED) * ALIGNED
        memory = torch.zeros(size.slots * (width + 8), dtype=torch.uint8, device=device)
        return cls.on(memory, size.slots)

    @classmethod
    def on(cls, memory: torch.Tensor, slots: int) -> Mailbox:
        """The slots come first, then the numbers."""
        tensors, numbers = memory[: -8 * slots], memory[-8 * slots :]
        return cls(tensors.view(slots, -1), numbers.view(torch.int32).view(2, slots))

    def fits(self, size: MailboxSize) -> bool:
        slots, width = self.slots.shape
        return size.slots <= slots and size.slot_bytes <= width

    def next(self) -> tuple[int, int]:
        """The slot of the next tensor, and how often it has been used before."""
        turn, slot = divmod(self.count, len(self.slots))
        self.count += 1
        return slot, turn

    def filled(self, slot: int) -> int:
        return self.turns.data_ptr() + 4 * slot

    def emptied(self, slot: int) -> int:
        return self.filled(len(self.slots) + slot)

    def view(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """The memory of a slot with the sizes of a tensor."""
        key = slot, like.shape, like.dtype
        if key not in self.views:
            flat = self.slots[slot][: like.numel() * like.element_size()]
            self.views[key] = flat.view(like.dtype).view(like.shape)
        return self.views[key]

    def put(self, tensor: torch.Tensor) -> None:
        """Copy a tensor into its slot on the current stream, as soon as that is empty."""
        slot, turn = self.next()
        wait_for_value(self.emptied(slot), turn)
        self.view(slot, tensor).copy_(tensor)
        write_value(self.filled(slot), turn + 1)

    def take(self, slot: int, turn: int, into: torch.Tensor) -> None:
        """Copy a tensor out of its slot on the current stream, as soon as that is filled."""
        wait_for_value(self.filled(slot), turn + 1)
        into.copy_(self.view(slot, into))
        write_value(self.emptied(slot), turn + 1)


@dataclass
class Outbox:
    """The sender's end, with a stream of its own: it may wait for a slot."""

    mailbox: Mailbox
    stream: torch.cuda.Stream

    def send(self, tensor: torch.Tensor) -> Copied:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.mailbox.put(tensor)
            return Copied(self.stream.record_event(), tensor)


@dataclass(slots=True)
class Copied:
    """A tensor on its way into a mailbox. It is kept alive until somebody waits."""

    event: torch.cuda.Event
    tensor: torch.Tensor

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


@dataclass(slots=True)
class Delivery:
    """Tensors that come through a mailbox. `wait` takes them out, on the current stream."""

    mailbox: Mailbox
    made: Callable[[], tuple[torch.Tensor, ...]]
    places: list[tuple[int, int]]  # slots and turns

    def wait(self) -> tuple[torch.Tensor, ...]:
        tensors = self.made()
        for tensor, place in zip(tensors, self.places, strict=True):
            self.mailbox.take(*place, tensor)
        return tensors
