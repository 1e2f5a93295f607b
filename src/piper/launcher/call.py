"""The script of a process that `piper.launch` starts: calls a function, and keeps its result."""

from __future__ import annotations

import os
import pickle
import sys
from importlib import import_module
from multiprocessing.spawn import prepare
from pathlib import Path
from typing import Any

from piper.errors import InputError

SENT = "call"
BY_VALUE = ("cloudpickle", "ray.cloudpickle")  # Ray brings its own copy


def main(folder: Path) -> None:
    prepared, by_value, sent = pickle.loads((folder / SENT).read_bytes())
    prepare(prepared)  # loads the script that called `launch`, under another name than __main__
    fn, arguments, named = pickle.loads(sent)
    found = pickler(by_value).dumps(fn(*arguments, **named))
    (folder / result(os.environ["RANK"])).write_bytes(found)


def result(rank: int | str) -> str:
    return f"result-{rank}"


def pickler(by_value: bool) -> Any:
    """The module that turns values into bytes. Code of a notebook is sent by value."""
    if not by_value:
        return pickle
    for name in BY_VALUE:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise InputError.of(
        "launch",
        "sending functions of a notebook to other processes needs cloudpickle",
        "pip install cloudpickle, or put the function in a .py file and import it",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
