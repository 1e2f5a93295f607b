"""End a process when its parent ends, for whatever reason, also kill -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def die_with_torchrun(given: Mapping[str, str] = os.environ) -> None:
    """Piper's launchers start each process with this. torchrun does not, and would leave it."""
    if TORCHRUN in given:
        die_with(os.getppid())
