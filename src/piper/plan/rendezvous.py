"""Match messages: the n-th send with the n-th receive of a channel, and collectives by group.

Used by everything that runs plans together: the check, the hardware queues and the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from piper.names import Device
from piper.plan.instructions.communicator import Channel, Communicator

Event = tuple[Device, int]  # an instruction of a device
Devices = tuple[Device, ...]


@dataclass
class Rendezvous:
    """The events that have arrived at each communicator and wait for the other members."""

    present: Callable[[Devices], Devices]  # the members of a group that have a plan
    waiting: dict[Communicator, dict[Device, deque[Event]]] = field(default_factory=dict)

    def arrive(self, communicator: Communicator, event: Event) -> list[Event] | None:
        """Add an event. If all members have arrived, return the match; a send comes first."""
        if communicator not in self.waiting:
            self.waiting[communicator] = {device: deque() for device in self.members(communicator)}
        queues = self.waiting[communicator]
        queues[event[0]].append(event)
        return [queue.popleft() for queue in queues.values()] if all(queues.values()) else None

    def members(self, communicator: Communicator) -> Devices:
        """Both ends of a channel, or the members of a group that have a plan."""
        both = isinstance(communicator, Channel)
        return communicator.members if both else self.present(communicator.members)

    def unmatched(self) -> Iterator[tuple[Communicator, Event]]:
        """The events that were never matched."""
        for communicator, queues in self.waiting.items():
            yield from ((communicator, event) for queue in queues.values() for event in queue)
