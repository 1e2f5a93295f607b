"""All devices of a strategy as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from piper.plan.instructions import Plan
from piper.runtime.batch import StepInputs
from piper.runtime.comm.gloo import Comm
from piper.runtime.comm.threads import Hub, ThreadComm
from piper.runtime.execute import Program


def run_together(
    plans: Sequence[Plan],
    load: Callable[[Plan, Comm], Program],
    batches: Sequence[Sequence[StepInputs]],  # of each plan, its steps
    after_step: Callable[[int, Program], None],
) -> None:
    """Run the steps on every device at once. Raises the first error of any device."""
    hub = Hub(len(plans))
    programs = [load(plan, ThreadComm(hub, plan.device)) for plan in plans]
    errors: list[BaseException] = []

    def work(program: Program, mine: Sequence[StepInputs]) -> None:
        try:
            with hub.turn:
                for number, batch in enumerate(mine):
                    program.step(batch)
                    after_step(number, program)
        except BaseException as error:
            errors.append(error)
            hub.fail()

    pairs = zip(programs, batches, strict=True)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
