"""Record a few steps of a run: the times of all devices, on one clock, in one file."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import time
from pathlib import Path

import torch

from piper.errors import InputError
from piper.job.compile.compiler import Compiled
from piper.launcher.trace_window import Window, window_in
from piper.names import amount
from piper.plan.analyse.interference import interference, interference_text
from piper.plan.analyse.trace import Trace
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Program
from piper.runtime.observe.clocks import Clock, Offset, offset_to_first
from piper.runtime.observe.device_times import Times, device_times
from piper.runtime.observe.profiler import Profiler, uses_accelerator
from piper.runtime.observe.recorder import Recorder, beginning, merged, on_devices, title
from piper.runtime.processes.gathering import gather
from piper.view.run_file import save_run

LOG = logging.getLogger("piper")
NEVER = Window(Path(), first=0, count=0)


class Recording:
    """Records the steps of a window. All processes do the same.

    The times of a step go to the first process right after it. So the first process can write what
    it has at any time, even if the others fail.
    """

    def __init__(self, window: Window = NEVER, clock: Clock = time.perf_counter_ns) -> None:
        self.window, self.clock = window, clock
        self.recorder: Recorder | None = None  # made at the first recorded step
        self.profiler: Profiler | None = None
        self.offset = Offset()
        self.traces: list[Trace] = []  # on the first process
        self.zeros: list[int] = []  # when each trace begins, on the clock of the first process
        self.starts: list[list[int]] = []  # of each step: when the host reached each instruction
        self.compiled: Compiled | None = None
        self.over = False

    def step(self, number: int, program: Program, batch: StepInputs) -> bool:
        """Take a step. Returns whether it was recorded, for `keep`."""
        recorder = self.ready(number, program)
        if recorder is None:
            program.step(batch)
            return False
        try:
            recorder.step(batch)
            return True
        except BaseException:
            self.finish()  # with the steps before this one
            raise

    def ready(self, number: int, program: Program) -> Recorder | None:
        """The recorder of this step, if it is to be recorded."""
        if self.over or self.position(number) not in self.window:
            return None
        if self.recorder is None:
            self.start(program)
        if self.recorder is not None and self.recorder.program is not program:
            LOG.warning("step %d is not recorded: its batch has different shapes", number)
            return None
        return self.recorder

    def position(self, number: int) -> int:
        """What the window calls this step."""
        return number

    def start(self, program: Program) -> None:
        """Set up before the first recorded step, so that it does not count as time of the step."""
        profile = self.window.profile or uses_accelerator(program)
        self.recorder = Recorder(program, self.clock, named=profile)
        self.offset = offset_to_first(self.clock)
        if profile:
            self.profiler = Profiler(beside(self.window.path, program.plan.device))
            self.profiler.start()
        atexit.register(self.finish)

    def keep(self, number: int, recorded: bool, made: Compiled | None) -> None:
        """After a step: gather the times on the first process, and finish after the last step."""
        if recorded and self.recorder is not None:
            notes = self.recorder.notes()
            self.starts.append(notes.start)
            everyone = gather((notes, self.offset.nanoseconds))
            if everyone is not None and made is not None:
                self.traces.append(merged(number, made.device_plans, everyone))
                self.zeros.append(beginning(everyone))
                self.compiled = made
        if not self.over and self.position(number) == self.window.last:
            if self.recorder is not None and uses_accelerator(self.recorder.program):
                self.use_device_times(self.recorder)
            self.finish()

    def use_device_times(self, recorder: Recorder) -> None:
        """Replace host times by GPU times, after the last step. Every process calls it."""
        seen: list[Times] = [{} for _ in self.starts]
        if self.profiler is not None:
            self.profiler.stop()
            names = [title(one) for one in recorder.program.plan.instructions]
            seen = device_times(self.profiler.path, names, self.starts)
        everyone = gather((seen, self.offset.nanoseconds))
        if everyone is not None:
            self.traces = [
                on_devices(trace, self.zeros[k], [(steps[k], offset) for steps, offset in everyone])
                for k, trace in enumerate(self.traces)
            ]

    def finish(self) -> None:
        """Write what was recorded, once. It does not need the other processes."""
        if self.over or self.window is NEVER:
            return
        self.over = True
        atexit.unregister(self.finish)
        if self.profiler is not None:
            self.profiler.stop()
        if self.compiled is not None:
            self.save(self.compiled)
        elif self.recorder is None and os.environ.get("RANK", "0") == "0":
            LOG.warning("nothing was recorded: the Trainer never reached %s", self.window.text)

    def save(self, made: Compiled) -> None:
        """Write the file. If this fails, training goes on."""
        try:
            name = Path(sys.argv[0]).stem or "run"
            self.window.path.parent.mkdir(parents=True, exist_ok=True)
            machine, plans = machine_name(self.recorder), made.device_plans
            slowed = interference_text(interference(plans, self.traces))
            notes = [slowed] if slowed else []
            rest = machine, notes, made.optimizer
            save_run(self.window.path, name, made.dag, plans, self.traces, *rest)
        except OSError as error:
            LOG.warning("the recorded steps are lost: %s", error)
            return
        seen, wanted, path = len(self.traces), self.window.count, self.window.path
        if seen < wanted:
            LOG.warning("recorded only %d of %s before the end", seen, amount(wanted, "step"))
        LOG.info("recorded %s%s", amount(seen, "step"), self.place(path))
        for note in notes:
            LOG.info("%s", note)

    def place(self, path: Path) -> str:
        return f" in {path}: `piper view {path}` shows them"


def machine_name(recorder: Recorder | None) -> str:
    """The device of this process, and its host."""
    cuda = recorder is not None and uses_accelerator(recorder.program)
    device = torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})"
    return f"{device}, host {platform.node()}"


class EnvironmentRecording(Recording):
    """The recording of `piper run --trace`, made by the first Trainer that reaches its window.

    Its steps are those that this process trains: a run that resumes at step 12 begins with step 13.
    """

    taken = False
    before: int | None = None  # steps that were done when this process took its first one

    def position(self, number: int) -> int:
        if self.before is None:
            self.before = number - 1
        return number - self.before

    def start(self, program: Program) -> None:
        self.over, EnvironmentRecording.taken = EnvironmentRecording.taken, True
        if not self.over:
            super().start(program)

    def place(self, path: Path) -> str:
        """`piper run` names the file at the end."""
        return ""


def from_environment() -> Recording:
    """The recording that the environment asks for, or one of no steps."""
    window = window_in(os.environ)
    return Recording() if window is None else EnvironmentRecording(window)


def recording(path: str | Path, first: int, steps: int, profile: bool) -> Recording:
    """The recording that a script asks for."""
    if steps < 1:
        raise InputError.of("record", f"cannot record {steps} steps", "write steps=1 or more")
    return Recording(Window(Path(path), first, steps, profile))


def beside(path: Path, device: int) -> Path:
    """Where a device's profile goes.

    >>> beside(Path("out/run.json"), 2).name
    'run.ops2.json'
    """
    return path.with_name(f"{path.stem}.ops{device}.json")
