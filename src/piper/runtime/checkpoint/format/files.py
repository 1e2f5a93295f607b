"""Files that are on the disk when a function returns: written, synchronized, then renamed."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from piper.runtime.checkpoint.format.problems import damaged

SLICE = 1 << 22  # bytes that are written at once, without the lock of the interpreter


def digest_of(content: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def write_new(path: Path, parts: Iterable[memoryview]) -> int:
    """Write a file that does not exist yet. Returns its length."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        total = sum(written(file, part) for part in parts)
        os.fsync(file)
    finally:
        os.close(file)
    return total


def written(file: int, content: memoryview) -> int:
    """Write all of it: the system may take less at a time."""
    done = 0
    while done < len(content):
        done += os.write(file, content[done : done + SLICE])
    return done


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in place of another one, at once. A crash leaves one or the other."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_new(aside, [memoryview(content)])
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk, too."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_part(path: Path, start: int, length: int) -> bytearray:
    """Some bytes of a file, in memory of their own."""
    content = bytearray(length)
    view, done = memoryview(content), 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < length:
                count = file.readinto(view[done : done + SLICE])
                if not count:
                    raise damaged(path, "is too short")
                done += count
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    return content
