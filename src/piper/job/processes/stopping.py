"""Stop a run after a step, in all processes at once: on a signal, or when the script asks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Protocol

from piper.launcher.parent_death import die_with_torchrun
from piper.launcher.signals import SAVE

LOG = logging.getLogger("piper")


class Saving(Protocol):
    """A Trainer, as it is seen here."""

    steps: int

    def save(self, folder: str | Path, *, keep: int) -> None: ...

    def close(self) -> None: ...


class StopRequest:
    """Whether this process was asked to stop, and whether all processes know that one was.

    A process ends if its launcher does. With `piper run --save-on-signal FOLDER`, SIGTERM asks:
    after the step, all processes save and end their scripts.
    """

    def __init__(self) -> None:
        die_with_torchrun()
        self.wanted, self.agreed = False, False
        self.folder = os.environ.get(SAVE)
        if self.folder and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.want)

    def want(self, *_: object) -> None:
        self.wanted = True

    def leave(self, trainer: Saving) -> None:
        """After a step: save and end, if a signal asked for it."""
        if self.agreed and self.folder:
            trainer.save(self.folder, keep=sys.maxsize)  # the script says which of them may go
            LOG.info("saved step %d in %s", trainer.steps, self.folder)
            trainer.close()
            raise SystemExit(0)
