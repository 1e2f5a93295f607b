"""Who has come to which meeting, on paper: sends with receives, and the devices of a group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from piper.names import Device

Channel = tuple[str, Device, Device]  # stream, sender, receiver
Group = tuple[str, tuple[Device, ...]]  # stream, devices
Event = tuple[Device, int]  # an instruction of a device


@dataclass
class Wires:
    """What has started and not met its other side yet, in order on each channel and in each
    group."""

    channels: dict[Channel, tuple[deque[Event], deque[Event]]] = field(default_factory=dict)
    groups: dict[Group, dict[Device, deque[Event]]] = field(default_factory=dict)

    def moved(self, channel: Channel, event: Event) -> Iterator[tuple[Event, Event]]:
        """A device starts to send or to receive; yields the pairs that are complete now."""
        sends, receives = self.channels.setdefault(channel, (deque(), deque()))
        (sends if event[0] == channel[1] else receives).append(event)
        while sends and receives:
            yield sends.popleft(), receives.popleft()

    def joined(self, group: Group, here: tuple[Device, ...], event: Event) -> Iterator[list[Event]]:
        """A device comes to its group, of which these must come; yields the meetings that are
        complete now."""
        if group not in self.groups:
            self.groups[group] = {device: deque() for device in here}
        rows = self.groups[group]
        rows[event[0]].append(event)
        while all(rows.values()):
            yield [row.popleft() for row in rows.values()]

    def waiting(self) -> Iterator[tuple[str, Event]]:
        """What has met nothing, and where."""
        for (stream, source, target), (sends, receives) in self.channels.items():
            for event in (*sends, *receives):
                yield f"on {stream} from {source} to {target} meets nothing", event
        for (stream, _), rows in self.groups.items():
            for row in rows.values():
                for event in row:
                    yield f"on {stream} is not met by all of its group", event


def sent(node: str) -> str:
    """A device may be at both ends of a transfer, for different replicas."""
    return f"{node} (sent)"


def difference(found: set[str], wanted: set[str]) -> str:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    parts = [f"lacks {missing[0]}"] if missing else []
    parts += [f"holds {extra[0]}, which does not belong there"] if extra else []
    return " and ".join(parts)
