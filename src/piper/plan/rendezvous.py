"""Who meets whom: sends with receives, in order on each channel; the devices of a group, likewise.

One machine for all that run plans together: the check and the queues on paper, the simulator on a
clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from piper.names import Device
from piper.plan.meeting import Channel, Meeting

Event = tuple[Device, int]  # an instruction of a device
Devices = tuple[Device, ...]


@dataclass
class Rendezvous:
    """What has come to its meeting, and waits there for the others."""

    present: Callable[[Devices], Devices]  # of a group, those that come: the others have no plan
    waiting: dict[Meeting, dict[Device, deque[Event]]] = field(default_factory=dict)

    def arrive(self, meeting: Meeting, event: Event) -> list[Event] | None:
        """A device comes; if all are there now, what meets: of a channel, the send first."""
        if meeting not in self.waiting:
            self.waiting[meeting] = {device: deque() for device in self.members(meeting)}
        rows = self.waiting[meeting]
        rows[event[0]].append(event)
        return [row.popleft() for row in rows.values()] if all(rows.values()) else None

    def members(self, meeting: Meeting) -> Devices:
        """Who comes: both ends of a channel, and those of a group that have a plan."""
        both = isinstance(meeting, Channel)
        return meeting.members if both else self.present(meeting.members)

    def alone(self) -> Iterator[tuple[Meeting, Event]]:
        """What has met nothing, and where."""
        for meeting, rows in self.waiting.items():
            yield from ((meeting, event) for row in rows.values() for event in row)
