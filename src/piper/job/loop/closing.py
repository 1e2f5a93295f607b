"""A Trainer in a `with`: closed where the block ends. Otherwise, where the script ends."""

from __future__ import annotations

import weakref
from typing import Protocol, Self

from piper.runtime.processes.world import world


class Closable(Protocol):
    def close(self) -> None: ...


class Closing:
    """What has a `close`, which a script may leave out."""

    def close(self) -> None:
        raise NotImplementedError

    def _close_at_exit(self, *parts: Closable) -> None:
        """Close at least these when the script ends, or nobody has this Trainer any more."""
        for part in parts:
            weakref.finalize(self, part.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error, one of several processes ends at once: the others may wait for it."""
        if error is None or world() == 1:
            self.close()
