"""Whether a script looked at the arguments that it was given."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any


class WatchedArguments(list[str]):
    """A list for `sys.argv` that knows whether anybody read more than the name of the script."""

    was_read = False

    def __getitem__(self, at: Any) -> Any:
        self.was_read |= at != 0
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[str]:
        self.was_read = True
        return super().__iter__()

    def __len__(self) -> int:
        self.was_read = True
        return super().__len__()

    def __contains__(self, word: object) -> bool:
        self.was_read = True
        return super().__contains__(word)

    def __getattribute__(self, name: str) -> Any:
        """Methods, such as `copy` and `pop`."""
        if name[0] != "_" and name != "was_read":
            self.was_read = True
        return super().__getattribute__(name)

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        """To a process that the script starts, it is an ordinary list."""
        return list, ([list.__getitem__(self, at) for at in range(list.__len__(self))],)


@cache
def warn_of_unread(script: Path, arguments: Sequence[str]) -> None:
    """Once for each script and arguments: some commands run it twice."""
    print(
        f"piper: {script.name} made its Trainer without reading its arguments, "
        f"{' '.join(arguments)}: does it read them, as with argparse?",
        file=sys.stderr,
    )
