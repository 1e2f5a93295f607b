"""A private folder of texts by key: bounded, written atomically, and checked when read."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LOG = logging.getLogger("piper")
VARIABLE = "PIPER_CACHE"  # a folder, or one of OFF
OFF = ("off", "0", "no", "false")
MOST = 2**28  # bytes of all entries together
LARGEST = 2**24  # bytes of one entry
OFTEN = 64  # writes between two looks at the size of the folder
SUFFIX = ".region"


@dataclass
class CacheFolder:
    """Entries that are damaged or unreadable are missing. A folder of another user is not used."""

    path: Path
    most: int = MOST
    written: int = field(default=0, repr=False)

    def read(self, key: str) -> str | None:
        file = self.path / f"{key}{SUFFIX}"
        try:
            found = file.stat()
            if not self.is_private() or not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
                return None  # reading a pipe would never end
            digest, _, text = file.read_bytes().partition(b"\n")
            if hashlib.sha256(text).hexdigest().encode() != digest:
                file.unlink()
                return None
            os.utime(file)  # the entries that are used last stay
            return text.decode()
        except (OSError, UnicodeDecodeError):
            return None

    def write(self, key: str, text: str) -> None:
        content = text.encode()
        if len(content) > LARGEST:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.is_private():
                self.put(key, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        except OSError as error:  # no space, or a file system that cannot be written to
            LOG.debug("the cache in %s cannot be written: %s", self.path, error)

    def put(self, key: str, content: bytes) -> None:
        """Another process sees the whole entry, or none."""
        if self.written % OFTEN == 0:
            self.shrink()
        self.written += 1
        new = self.path / f"{key}.{secrets.token_hex(8)}.new"
        try:
            with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(content)
            new.replace(self.path / f"{key}{SUFFIX}")
        finally:
            new.unlink(missing_ok=True)

    def is_private(self) -> bool:
        """Whether nobody else can have written an entry."""
        found = self.path.stat()
        return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def shrink(self) -> None:
        """Remove the entries that were not used for longest, and what writers left behind."""
        rows = []
        for entry in list(os.scandir(self.path)):
            if entry.name.endswith((SUFFIX, ".new")):
                with suppress(OSError):  # another process removed it
                    found = entry.stat()
                    rows.append((found.st_mtime, found.st_size, Path(entry)))
        total = sum(size for _, size, _ in rows)
        if total <= self.most:
            return
        for _, size, file in sorted(rows):
            if total <= self.most // 2:
                return
            file.unlink(missing_ok=True)
            total -= size


def folder_in(environment: Mapping[str, str] = os.environ) -> CacheFolder | None:
    """The folder that the environment names, by default one in the home. None: it is off.

    >>> folder_in({"PIPER_CACHE": "off"})
    >>> folder_in({"PIPER_CACHE": "/scratch/piper"}).path.as_posix()
    '/scratch/piper'
    """
    said = environment.get(VARIABLE, "")
    if said.lower() in OFF:
        return None
    if said:
        return folder_at(Path(said).expanduser())
    caches = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return folder_at(Path(caches) / "piper" / "regions") if os.path.isabs(caches) else None


@cache
def folder_at(path: Path) -> CacheFolder:
    """One for all captures of a process: it counts their writes."""
    return CacheFolder(path)
