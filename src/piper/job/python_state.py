"""The Python state of the model and the loss, as all processes know it."""

from __future__ import annotations

from dataclasses import dataclass

from piper.capture import Watch


@dataclass
class PythonState:
    """The first process captures, so its state counts. The others learn it in each step."""

    watch: Watch | None = None  # since the first capture, where the model is captured
    agreed: int = 0  # elsewhere

    def now(self) -> int:
        """A number for the state. It is 0 until something changes."""
        return self.agreed if self.watch is None else self.watch.now()
