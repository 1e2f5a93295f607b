"""The machine that runs all plans together, on paper.

A device goes on until something that it waits for has not ended. What its instructions do is up to
the readers of this machine: the check follows what buffers hold, the queues hold up more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from piper.names import Device
from piper.plan.instructions import Instruction, Plan, is_message
from piper.plan.rendezvous import Event, Rendezvous


@dataclass
class Progress:
    """One device: how far it is in its plan."""

    plan: Plan
    at: int = 0

    @property
    def here(self) -> Event:
        return self.plan.device, self.at


D = TypeVar("D", bound=Progress)


@dataclass
class Machine(Generic[D]):
    """All devices, what has ended, and who waits for what."""

    devices: dict[Device, D]
    rendezvous: Rendezvous
    ended: set[Event] = field(default_factory=set)
    asleep: dict[Event, Device] = field(default_factory=dict)  # who waits for it
    woken: list[Device] = field(default_factory=list)

    def run(self) -> list[D]:
        """Run all plans as far as they go; those that never come to their end."""
        awake = deque(self.devices)
        while awake:
            self.advance(self.devices[awake.popleft()])
            awake.extend(self.woken)
            self.woken.clear()
        return [one for one in self.devices.values() if one.at < len(one.plan.instructions)]

    def advance(self, device: D) -> None:
        """Go on until something that is waited for has not ended."""
        instructions = device.plan.instructions
        while device.at < len(instructions):
            one = instructions[device.at]
            event = self.pending(device, one)
            if event is not None:
                self.asleep[event] = device.plan.device
                return
            self.do(device, one)
            device.at += 1

    def pending(self, device: D, one: Instruction) -> Event | None:
        """Something that it waits for and that has not ended. Compute is in order."""
        for position in one.waits:
            event = device.plan.device, position
            if event not in self.ended and is_message(device.plan.instructions[position]):
                return event
        return None

    def do(self, device: D, one: Instruction) -> None:
        """What an instruction does once nothing is pending."""
        self.meet(device, one)

    def meet(self, device: D, one: Instruction) -> list[Event] | None:
        """Come to its meeting, if it has one; what is complete now has ended."""
        meeting = one.meeting(device.plan.device)
        met = None if meeting is None else self.rendezvous.arrive(meeting, device.here)
        if met:
            self.ended.update(met)
            self.woken += [self.asleep.pop(event) for event in met if event in self.asleep]
        return met
