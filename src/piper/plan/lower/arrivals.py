"""Which instruction fills each buffer, and which streams have waited for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from piper.names import COMPUTE
from piper.plan.instructions import Waits


@dataclass(kw_only=True)
class Arrivals:
    """The buffers of one device, as its plan is written."""

    made_by: dict[str, int] = field(default_factory=dict)  # buffer -> instruction to wait for
    arriving: dict[str, int] = field(default_factory=dict)  # buffer -> message that fills it
    waited: set[tuple[str, int]] = field(default_factory=set)  # stream, message it waited for
    awaited: set[int] = field(default_factory=set)  # messages that any stream waited for
    loaded: dict[str, int] = field(default_factory=dict)

    def wait_for(self, buffers: tuple[str, ...], stream: str = COMPUTE) -> Waits:
        """The messages that fill these buffers and that the stream has not waited for yet."""
        found = [self.arriving[buffer] for buffer in buffers if buffer in self.arriving]
        return self.not_yet_waited(found, stream)

    def ready(self, buffers: tuple[str, ...], stream: str) -> Waits:
        """The messages that fill these buffers, and the last computation that makes one of them."""
        makers = (self.made_by.get(buffer, self.loaded.get(buffer)) for buffer in buffers)
        made = max((k for k in makers if k is not None), default=None)
        waits = self.wait_for(buffers, stream)
        return tuple(sorted({*waits, *(() if made is None else (made,))}))

    def not_yet_waited(self, positions: Iterable[int], stream: str) -> Waits:
        new = sorted({k for k in positions if (stream, k) not in self.waited})
        if not new:  # most of the time
            return ()
        self.waited.update((stream, k) for k in new)
        self.awaited.update(new)
        return tuple(new)

    def unread(self, buffers: Iterable[str]) -> Iterator[int]:
        """The messages that fill these buffers and that nothing waits for: this device only takes
        part in them for others."""
        for buffer in buffers:
            k = self.arriving.get(buffer)
            if k is not None and k not in self.awaited:
                self.awaited.add(k)
                yield k
