"""An interpreter that runs the plans of all devices together, without data and without time.

A device advances until it waits for something that has not completed. Subclasses decide what an
instruction does: the check tracks what buffers hold, the hardware queues block on more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from piper.names import COMPUTE, Device
from piper.plan.instructions import Instruction, Plan, is_message
from piper.plan.instructions.communicator import Communicator
from piper.plan.rendezvous import Event, Rendezvous


@dataclass
class Progress:
    """One device and its position in its plan."""

    plan: Plan
    at: int = 0

    @property
    def here(self) -> Event:
        return self.plan.device, self.at


D = TypeVar("D", bound=Progress)


@dataclass
class Interpreter(Generic[D]):
    """All devices, the events that have completed, and the devices that wait for others."""

    devices: dict[Device, D]
    rendezvous: Rendezvous
    ended: set[Event] = field(default_factory=set)
    asleep: dict[Event, Device] = field(default_factory=dict)  # event -> the device waiting for it
    woken: list[Device] = field(default_factory=list)

    def run(self) -> list[D]:
        """Run all plans as far as they go, and return the devices that did not finish."""
        awake = deque(self.devices)
        while awake:
            self.advance(self.devices[awake.popleft()])
            awake.extend(self.woken)
            self.woken.clear()
        return [one for one in self.devices.values() if one.at < len(one.plan.instructions)]

    def advance(self, device: D) -> None:
        """Run instructions until one waits for something that has not completed."""
        instructions = device.plan.instructions
        for at in range(device.at, len(instructions)):
            device.at, one = at, instructions[at]
            if one.waits or one.stream != COMPUTE:  # everything else runs at once
                event = self.pending(device, one)
                if event is not None:
                    self.asleep[event] = device.plan.device
                    return
            self.do(device, one)
        device.at = len(instructions)

    def pending(self, device: D, one: Instruction) -> Event | None:
        """An event that the instruction waits for and that has not completed.

        Compute runs in order, so only messages can be pending.
        """
        for position in one.waits:
            event = device.plan.device, position
            if event not in self.ended and is_message(device.plan.instructions[position]):
                return event
        return None

    def do(self, device: D, one: Instruction) -> None:
        """Execute an instruction whose waits have all completed."""
        self.meet(device, one)

    def meet(self, device: D, one: Instruction) -> list[Event] | None:
        """Arrive at the instruction's communicator, if it has one.

        If all members have arrived, their events complete; these are returned. A copy between host
        and device needs nobody else.
        """
        communicator = one.communicator(device.plan.device)
        if communicator is not None:
            return self.arrive(device, communicator)
        if is_message(one):
            self.ended.add(device.here)
        return None

    def arrive(self, device: D, communicator: Communicator) -> list[Event] | None:
        met = self.rendezvous.arrive(communicator, device.here)
        if met:
            self.ended.update(met)
            self.woken += [self.asleep.pop(event) for event in met if event in self.asleep]
        return met
