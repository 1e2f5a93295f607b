"""A folder of a run that only its user can read, and that goes even if the launcher is killed."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Waits for a line. Without one, the launcher was killed: give its processes a second to end.
CLEAN = """trap '' HUP INT QUIT TERM
read -r line && exit
sleep 1
eval "$2"
rm -rf -- "$1"
"""


@contextmanager
def private_folder(prefix: str, last: str = "") -> Iterator[Path]:
    """A new folder. If this process is killed, a shell runs `last` ("$1" is the folder) and removes
    the folder.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        cleaner = subprocess.Popen(
            ["sh", "-c", CLEAN, "sh", name, last], stdin=subprocess.PIPE, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        try:
            yield Path(name)
        finally:
            with suppress(BrokenPipeError):
                cleaner.communicate(b"done\n")
