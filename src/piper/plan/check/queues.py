"""Whether plans run to their end wherever hardware has few queues.

A GPU puts the streams of a program into a few queues. A message that waits for an earlier one of
its own channel then holds up whatever comes after it in its queue, which may be anything at all. So
here a device stops at such a message until the earlier one has ended: plans that end like this end
with any number of queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from piper.ir.roles import Present
from piper.plan.check.machine import Machine, Progress
from piper.plan.instructions import Instruction, Plan
from piper.plan.meeting import Meeting
from piper.plan.rendezvous import Event, Rendezvous


def stops(plans: Sequence[Plan]) -> Event | None:
    """The first device that would never go on, and where; None if all come to their end."""
    present = Present(plan.device for plan in plans)
    queues = Queues({plan.device: Progress(plan) for plan in plans}, Rendezvous(present.of))
    return next((device.here for device in queues.run()), None)


@dataclass
class Queues(Machine[Progress]):
    """Devices that hold up a message until the one before it on its channel has ended."""

    last: dict[tuple[int, Meeting], Event] = field(default_factory=dict)  # of each device

    def pending(self, device: Progress, one: Instruction) -> Event | None:
        event = super().pending(device, one)
        meeting = one.meeting(device.plan.device) if event is None else None
        before = self.last.get((device.plan.device, meeting)) if meeting else None
        return before if before is not None and before not in self.ended else event

    def do(self, device: Progress, one: Instruction) -> None:
        meeting = one.meeting(device.plan.device)
        if meeting is not None:
            self.last[device.plan.device, meeting] = device.here
        self.meet(device, one)
