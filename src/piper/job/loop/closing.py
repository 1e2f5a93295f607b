"""A Trainer in a `with`: closed where the block ends."""

from __future__ import annotations

from typing import Self

from piper.runtime.processes.world import world


class Closing:
    """What has a `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error, one of several processes ends at once: the others may wait for it."""
        if error is None or world() == 1:
            self.close()
