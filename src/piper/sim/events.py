"""Instructions on the clock, and the lines on which messages go one after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

Event = tuple[int, int]  # whose plan, and an instruction of it
START: Event = (-1, -1)


@dataclass
class Line:
    """What goes in order: the messages of a channel, the meetings of a group."""

    waiting: deque[tuple[list[Event], Event]] = field(default_factory=deque)  # and who made it
    busy: bool = False
    last: Event = START
