"""The operators and kernels of each instruction, from torch's profiler."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile, supported_activities

from piper.runtime.execute import Program


class Profiler:
    """Profiles this process from start to stop, and writes a Chrome trace.

    The recorder puts each instruction in a range with the name of its DAG node.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.profile = profile(activities=supported_activities())
        self.stopped = False

    def start(self) -> None:
        self.profile.start()

    def stop(self) -> None:
        """Stop and write the trace. Later calls do nothing."""
        if self.stopped:
            return
        self.stopped = True
        self.profile.stop()
        self.profile.export_chrome_trace(str(self.path))


def uses_accelerator(program: Program) -> bool:
    """Whether work runs on an accelerator, so that the host's clock does not show its end."""
    return program.device.type != "cpu"
