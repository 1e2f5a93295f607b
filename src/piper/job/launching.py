"""`piper.launch`: run a function on several devices, from a script or a notebook."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from piper.errors import InputError
from piper.job.inspecting import is_inspecting
from piper.launcher.function import call_in_processes
from piper.launcher.given_arguments import refuse_unfit
from piper.launcher.script_errors import own_frames

NUMBERS = ("n", "nproc", "num_processes", "nprocs", "nproc_per_node", "world_size", "num_workers")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def with_number(call: Callable[Given, Result]) -> Callable[Given, Result]:
    """A number of processes that is given by name would be an argument of `fn`."""

    @wraps(call)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if len(args) < 2:
            name = next((f", and not by name ({one}=)" for one in kwargs if one in NUMBERS), "")
            what = f"the number of processes comes second{name}"
            raise InputError.of(
                "launch", what, "write piper.launch(fn, 2), and arguments of fn after"
            )
        return call(*args, **kwargs)

    return checked


@with_number
def launch(
    fn: Callable[Given, Result], n: int, /, *args: Given.args, **kwargs: Given.kwargs
) -> list[Result]:
    """Run `fn(*args, **kwargs)` in `n` new processes, one per device. Returns `n` results, by rank.

    `fn` makes a `Trainer`, as a script does. In a notebook, it may be defined in a cell. In a
    script, call `launch` below `if __name__ == "__main__":`, because every process imports the
    script. If a process fails, all end, and `LaunchError` says which one failed and why. Ctrl-C
    ends all processes.

        def train(steps):
            trainer = piper.Trainer(Net(), loss_fn, strategy, example=batch)
            return [trainer.step(*batch).loss for _ in range(steps)]

        losses, _ = piper.launch(train, 2, 10)
    """
    refuse_wrong_arguments(fn, n, args, kwargs)
    if is_inspecting():  # `piper show` wants the Trainer, not what it trains
        return [fn(*args, **kwargs)]
    return call_in_processes(fn, n, args, kwargs)


def refuse_wrong_arguments(fn: Any, n: int, given: Any, named: Any) -> None:
    """The error shows the user's own lines only: the message says all."""
    try:
        refuse_unfit(fn, n, given, named)
    except InputError as error:
        error.__traceback__ = own_frames(error.__traceback__)
        raise
