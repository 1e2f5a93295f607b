"""The lock of a folder: one run at a time saves to it.

The system releases it when the process ends, however that happens. The file stays, and says who
holds the lock, or held it last.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.format.strict_values import parsed_json

LOG = logging.getLogger("piper")
LOCK = "piper.lock"
PAGE = 4096  # bytes
HELD: dict[tuple[int, int], FolderLock] = {}  # of this process, by device and inode of the file


@dataclass
class FolderLock:
    """The right to write into a folder. Trainers of one process share it."""

    folder: Path
    file: int
    left: object  # folders that the last holder wanted to fill or remove, as the file says
    users: int = 0
    writing: threading.RLock = field(default_factory=threading.RLock)  # between threads
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))

    def note(self, *folders: str) -> None:
        """Write down who holds the lock, and the folders that it is filling or removing."""
        whose = {"host": socket.gethostname(), "pid": os.getpid(), "user": user(),
                 "since": self.since, "folders": folders}  # fmt: skip
        content = f"{json.dumps(whose)}\n".encode()
        content += b" " * (-len(content) % PAGE)  # written at once: a crash leaves no half of it
        os.pwrite(self.file, content, 0)
        os.ftruncate(self.file, len(content))
        os.fsync(self.file)

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            HELD.pop(key(self.file), None)
            os.close(self.file)


def take_lock(folder: Path) -> FolderLock:
    """Lock a folder, or say who has locked it."""
    file = open_lock(folder / LOCK)
    mine = HELD.get(key(file))
    if mine is None:
        mine = locked(folder, file)
        HELD[key(file)] = mine
    else:
        os.close(file)
    mine.users += 1
    return mine


def open_lock(path: Path) -> int:
    """A link is not followed: Piper writes to this file, and it may lead to one of the user's."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise refused(f"{path} is a link, not a file of Piper", "remove the link") from None


def locked(folder: Path, file: int) -> FolderLock:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            LOG.warning("%s cannot be locked (%s): let no other run save there", folder, error)
            return FolderLock(folder, file, None)
        whose = owner(file)
        os.close(file)
        raise refused(f"{folder} is in use by {text(whose)}", "save to another folder") from None
    return FolderLock(folder, file, owner(file).get("folders"))


def owner(file: int) -> dict[str, Any]:
    """Who holds the lock, or held it last; nothing if the file says nothing."""
    with suppress(ValueError):
        found = parsed_json(os.pread(file, 1 << 16, 0))
        if isinstance(found, dict):
            return found
    return {}


def unfinished(folder: Path) -> set[str]:
    """The folders that the last holder was filling or removing."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return set()
    try:
        found = owner(file).get("folders")
    finally:
        os.close(file)
    return set(map(str, found)) if isinstance(found, list) else set()


def text(whose: dict[str, Any]) -> str:
    """
    >>> text({"pid": 7, "host": "a", "user": "b", "since": "noon"})
    'process 7 of b on a, since noon'
    """
    known = {name: str(whose.get(name, "?"))[:60] for name in ("pid", "user", "host", "since")}
    return "process {pid} of {user} on {host}, since {since}".format(**known)


def user() -> str:
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())


def key(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def forget_in_child() -> None:
    """A process that was forked (by a data loader) holds no lock, also if it lives longer."""
    for one in HELD.values():
        os.close(one.file)
    HELD.clear()


os.register_at_fork(after_in_child=forget_in_child)
