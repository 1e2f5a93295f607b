"""Whether plans run to their end wherever hardware has few queues.

A GPU puts the streams of a program into a few queues. A message that waits for an earlier one of
its own channel then holds up whatever comes after it in its queue, which may be anything at all. So
here a device stops at such a message until the earlier one has ended: plans that end like this end
with any number of queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from piper.names import Device
from piper.plan.check.wires import Event, Wires
from piper.plan.instructions import (
    Exchange,
    Gather,
    Instruction,
    Plan,
    Recv,
    Reduce,
    Send,
    Total,
    is_message,
)


def stops(plans: Sequence[Plan]) -> tuple[Device, int] | None:
    """The first device that would never go on, and where; None if all come to their end."""
    queues = Queues(plans)
    queues.run()
    return next(((d, k) for d, k in queues.at.items() if k < len(queues.code[d])), None)


@dataclass
class Queues:
    """All devices, each at one of its instructions."""

    plans: Sequence[Plan]
    ended: set[Event] = field(default_factory=set)
    last: dict[tuple[Any, ...], Event] = field(default_factory=dict)  # on each channel of a device
    wires: Wires = field(default_factory=Wires)
    asleep: dict[Event, Device] = field(default_factory=dict)
    totals: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.code = {plan.device: plan.instructions for plan in self.plans}
        self.at = dict.fromkeys(self.code, 0)

    def run(self) -> None:
        awake = deque(self.code)
        while awake:
            device = awake.popleft()
            for event in self.advance(device):
                self.ended.add(event)
                if event in self.asleep:
                    awake.append(self.asleep.pop(event))

    def advance(self, device: Device) -> Iterator[Event]:
        """Go on until something has not ended; yields what ends by it."""
        code = self.code[device]
        while self.at[device] < len(code):
            here = device, self.at[device]
            for event in self.awaited(here, code[here[1]]):
                if event not in self.ended:
                    self.asleep[event] = device
                    return
            yield from self.start(here, code[here[1]])
            self.at[device] += 1

    def awaited(self, here: Event, one: Instruction) -> Iterator[Event]:
        code = self.code[here[0]]
        yield from ((here[0], k) for k in one.waits if is_message(code[k]))
        before = self.last.get((here[0], *channel(here[0], one)))
        if before is not None:
            yield before

    def start(self, here: Event, one: Instruction) -> Iterator[Event]:
        where = channel(here[0], one)
        if where:
            self.last[here[0], *where] = here
        match one:
            case Send() | Recv():
                for pair in self.wires.moved(where, here):
                    yield from pair
            case Reduce() | Gather() | Exchange():
                present = tuple(device for device in one.group if device in self.code)
                for meeting in self.wires.joined((one.stream, one.group), present, here):
                    yield from meeting
            case Total():
                self.totals.append(here)
                if len(self.totals) == len(self.code):
                    yield from self.totals


def channel(device: Device, one: Instruction) -> tuple[Any, ...]:
    """Where messages follow one another; nothing for what is no message."""
    match one:
        case Send():
            return one.stream, device, one.peer
        case Recv():
            return one.stream, one.peer, device
        case Reduce() | Gather() | Exchange():
            return one.stream, one.group
    return ()
