"""Who has come to which meeting on the clock, and what goes in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from piper.names import Device
from piper.plan.instructions import Exchange, Gather, Instruction, Recv, Reduce, Send, Total

Event = tuple[int, int]  # whose plan, and an instruction of it
START: Event = (-1, -1)


@dataclass
class Line:
    """What goes in order: the messages of a channel, the meetings of a group."""

    waiting: deque[tuple[list[Event], Event]] = field(default_factory=deque)  # and who made it
    busy: bool = False
    last: Event = START


@dataclass
class Meetings:
    """Sends and receives that have not met, devices whose group is not complete."""

    rows: Mapping[Device, int]  # devices that are on the clock
    channels: dict[object, tuple[deque[Event], deque[Event]]] = field(default_factory=dict)
    groups: dict[object, dict[int, deque[Event]]] = field(default_factory=dict)
    lines: dict[object, Line] = field(default_factory=dict)

    def line(self, key: object) -> Line:
        if key not in self.lines:
            self.lines[key] = Line()
        return self.lines[key]

    def join(
        self, event: Event, one: Instruction, device: Device
    ) -> Iterator[tuple[object, list[Event]]]:
        """A device comes to a meeting; yields what is complete now, and the line it goes on."""
        match one:
            case Send():
                yield from self.pair(("p2p", one.stream, device, one.peer), event, 0)
            case Recv():
                yield from self.pair(("p2p", one.stream, one.peer, device), event, 1)
            case Reduce() | Gather() | Exchange() | Total():
                yield from self.gather(one.stream, one.group, event)

    def pair(self, key: object, event: Event, end: int) -> Iterator[tuple[object, list[Event]]]:
        if key not in self.channels:
            self.channels[key] = (deque(), deque())
        ends = self.channels[key]
        ends[end].append(event)
        if all(ends):
            yield key, [ends[0].popleft(), ends[1].popleft()]

    def gather(
        self, stream: str, group: tuple[Device, ...], event: Event
    ) -> Iterator[tuple[object, list[Event]]]:
        key = ("group", stream, group)
        if key not in self.groups:
            here = [self.rows[device] for device in group if device in self.rows]
            self.groups[key] = {row: deque() for row in here}
        rows = self.groups[key]
        rows[event[0]].append(event)
        if all(rows.values()):
            yield key, [row.popleft() for row in rows.values()]
