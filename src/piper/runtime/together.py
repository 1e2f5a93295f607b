"""All devices of a strategy as threads of this process: to try a strategy out without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from piper.plan.instructions import Plan
from piper.runtime.comm import Comm, Hub, ThreadComm
from piper.runtime.execute import Batch, Program


def rehearse(
    plans: Sequence[Plan], load: Callable[[Plan, Comm], Program], batches: Sequence[Batch]
) -> list[Program]:
    """Run the steps on every device at once; the programs afterwards, by device.

    `load` makes a plan ready with the communicator it is given.
    """
    hub = Hub(len(plans))
    programs = [load(plan, ThreadComm(hub, plan.device)) for plan in plans]
    errors: list[BaseException] = []

    def work(program: Program) -> None:
        try:
            for batch in batches:
                program.step(batch)
        except BaseException as error:
            errors.append(error)
            hub.barrier.abort()

    threads = [threading.Thread(target=work, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return programs
