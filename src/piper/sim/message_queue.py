"""Events on the clock, and the queue of messages on each communicator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

Event = tuple[int, int]  # index of a plan, and position of an instruction in it
START: Event = (-1, -1)
Match = list[Event]  # the instructions that make up one message or collective


@dataclass
class MessageQueue:
    """Messages of one communicator, which run one after the other."""

    waiting: deque[tuple[Match, Event]] = field(default_factory=deque)  # match, and its cause
    busy: bool = False
    last: Event = START
