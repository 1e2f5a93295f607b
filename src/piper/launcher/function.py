"""Run a function in several processes of this host, and return what it returns."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from typing import Any

from piper.errors import InputError, LaunchError
from piper.launcher import call
from piper.launcher.ending import cause
from piper.launcher.given_arguments import launch_of
from piper.launcher.local import run_processes
from piper.launcher.private_folder import private_folder

PREPARED = ("sys_path", "sys_argv", "init_main_from_name", "init_main_from_path")
INTERRUPTED = 130
LAUNCHED = "PIPER_LAUNCHED"  # the call, for messages that say how to write it; {n}: the processes


def call_in_processes(
    fn: Callable[..., Any], n: int, arguments: Sequence[Any], named: Mapping[str, Any]
) -> list[Any]:
    """Call a function in `n` processes. Returns the results by rank."""
    refuse_wrong(fn, n)
    prepared = preparation()
    has_file = any(key.startswith("init_main") for key in prepared)
    with private_folder("piper-call-") as folder:
        sent = pickled((fn, arguments, named), by_value=not has_file)
        (folder / call.SENT).write_bytes(pickle.dumps((prepared, not has_file, sent)))
        told = {LAUNCHED: launch_of(fn, "{n}", ["..."] if arguments or named else [])}
        signalled, processes = run_processes(call.__file__, [str(folder)], n, told)
        if signalled:
            leave(signalled)
        code, text = cause(processes)
        if code:
            raise LaunchError(text)
        return [pickle.loads((folder / call.result(rank)).read_bytes()) for rank in range(n)]


def preparation() -> dict[str, Any]:
    """What a process must do first: import the script that called, if it is a file."""
    found = get_preparation_data("piper")
    if not Path(found.get("init_main_from_path") or __file__).is_file():  # such as <stdin>
        del found["init_main_from_path"]
    return {key: found[key] for key in PREPARED if key in found}


def leave(code: int) -> None:
    """As the signal would have ended a program without processes."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    sys.exit(code)


def pickled(value: Any, by_value: bool) -> bytes:
    """With the code of functions and classes that no file defines, if `by_value`."""
    try:
        return bytes(call.pickler(by_value).dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        fix = (
            "give a function and arguments that pickle can send: a function of a file, not a "
            "lambda, without open files or locks"
        )
        raise refused(f"the function or its arguments cannot be sent: {error}", fix) from error


def refuse_wrong(fn: Any, n: Any) -> None:
    if not callable(fn):
        raise refused(f"{fn!r} is not a function", "write piper.launch(train, 2)")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise refused(f"{n!r} is not a number of processes", "write piper.launch(train, 2)")
    if "RANK" in os.environ:
        fix = 'write `if __name__ == "__main__":` above the call, and start the script with python'
        raise refused("this process is one of several that were started together", fix)


def refused(what: str, fix: str) -> InputError:
    return InputError.of("launch", what, fix)
