"""The processes of a run, as saving and resuming sees them: what fails on one fails on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from piper.errors import MET, InputError, Located, NotSupported
from piper.runtime.checkpoint.format.problems import CHECKPOINT, SPACE, refused
from piper.runtime.processes.gathering import everyone
from piper.runtime.processes.world import patience, world

Found = TypeVar("Found")


@dataclass(frozen=True)
class Peers:
    """A process among others. They have a group of their own: a save may run beside steps."""

    rank: int = 0
    count: int = 1
    group: Any = None  # of torch.distributed

    def everyone(self, mine: Found) -> list[Found]:
        """The value of each process."""
        return everyone(mine, "a checkpoint", self.group) if self.count > 1 else [mine]

    def each(self, act: Callable[[], Found]) -> Found:
        """Run it on all processes. If it fails on one, it fails on all, so that none waits.

        Whatever fails: a loader of the user's may raise anything.
        """
        error: Exception | None = None
        result: list[Found] = []
        try:
            result.append(act())
        except Exception as found:
            error = refused(str(found), SPACE) if isinstance(found, OSError) else found
        problems = self.everyone([] if error is None else problem_of(error))
        if error is not None:
            raise error
        for rank, there in enumerate(problems):
            if there:
                where, what, fix = there
                echo = InputError.of(where, f"on device {rank}, {what}", fix)
                echo.add_note(f"{MET} {rank}")
                raise echo
        return result[0]

    def on_first(self, act: Callable[[], Found]) -> Found | None:
        """Run it on the first process. If it fails there, it fails on all."""
        return self.each(lambda: act() if self.rank == 0 else None)

    def from_first(self, act: Callable[[], Found]) -> Found:
        """The same, and all get the result."""
        found = self.everyone(self.on_first(act))[0]
        assert found is not None
        return found


def problem_of(error: Exception) -> list[str]:
    """What the others tell of it: where, what is wrong, and the fix."""
    if isinstance(error, NotSupported):
        where = error.where if isinstance(error, Located) else CHECKPOINT
        return [where, error.problems[0].what, error.problems[0].fix]
    return [CHECKPOINT, f"{type(error).__name__}: {error}", "see the lines of that process"]


def peers() -> Peers:
    """All processes make the group together."""
    if world() == 1:
        return Peers()
    return Peers(dist.get_rank(), world(), dist.new_group(backend="gloo", timeout=patience()))
