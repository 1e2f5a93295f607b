"""Whether plans finish on hardware with few queues.

A GPU maps the streams of a program to a few hardware queues. A message that waits for an earlier
message of its own communicator then blocks everything behind it in its queue, whatever that is.
So this check blocks the whole device at such a message until the earlier one has completed. Plans
that finish under this rule finish with any number of queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from piper.ir.by_device.roles import Present
from piper.names import COMPUTE
from piper.plan.check.interpreter import Interpreter, Progress
from piper.plan.instructions import Instruction, Plan
from piper.plan.instructions.communicator import Communicator
from piper.plan.rendezvous import Event, Rendezvous


def first_blocked(plans: Sequence[Plan]) -> Event | None:
    """The first device that never finishes, and where it stops; None if all finish."""
    present = Present(plan.device for plan in plans)
    queues = HardwareQueues({plan.device: Progress(plan) for plan in plans}, Rendezvous(present.of))
    return next((device.here for device in queues.run()), None)


@dataclass
class HardwareQueues(Interpreter[Progress]):
    """Devices that issue a message only when the previous one on its communicator has completed."""

    last: dict[tuple[int, Communicator], Event] = field(default_factory=dict)  # by device

    def pending(self, device: Progress, one: Instruction) -> Event | None:
        event = super().pending(device, one) if one.waits else None
        if event is not None or one.stream == COMPUTE:
            return event
        communicator = one.communicator(device.plan.device)
        before = self.last.get((device.plan.device, communicator)) if communicator else None
        return None if before in self.ended else before

    def do(self, device: Progress, one: Instruction) -> None:
        if one.stream == COMPUTE:
            return
        communicator = one.communicator(device.plan.device)
        if communicator is None:
            self.ended.add(device.here)
        else:
            self.last[device.plan.device, communicator] = device.here
            self.arrive(device, communicator)
