"""How long every instruction of a step takes, if one device runs them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from piper.runtime.batch import StepInputs
from piper.runtime.execute import Act, Program
from piper.runtime.hardware import settle
from piper.runtime.observe.measure import Lap, on_gpu
from piper.runtime.observe.recorder import Recorder, merged

Step = Callable[[StepInputs], list[float]]  # runs one; gives the seconds of each instruction


def stepwatch(program: Program) -> Step:
    """Time instructions on the GPU if there is one, and otherwise on the host, without waits."""
    return gpu_step(program) if program.device.type == "cuda" else host_step(program)


def host_step(program: Program) -> Step:
    recorder = Recorder(program)

    def step(batch: StepInputs) -> list[float]:
        recorder.step(batch)
        spans = merged(0, [program.plan], [(recorder.notes(), 0)]).spans[program.plan.device]
        following = [*(span.issued for span in spans[1:]), spans[-1].end]
        return [after - span.start for span, after in zip(spans, following, strict=True)]

    return step


def gpu_step(program: Program) -> Step:
    """The time between two events on the stream. If the host is slower, it is the host's."""
    laps: list[Lap] = []

    def note(do: Act) -> None:
        laps.append(on_gpu(do))

    acts: list[Act] = [partial(note, act) for act in program.acts]

    def step(batch: StepInputs) -> list[float]:
        laps.clear()
        plain, program.acts = program.acts, acts
        try:
            program.step(batch)
        finally:
            program.acts = plain
        settle(program.device)
        return [lap() for lap in laps]

    return step
