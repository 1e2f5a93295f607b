"""Files that the user names: an error says what is wrong with one, and what to do."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TypeVar

from piper.errors import InputError

Read = TypeVar("Read")
OUTPUT = "-o", "--output", "--out"  # of every command that writes what it shows to a file
WRITE = "name a file in a folder that is there, that you may write to, and that has room"
DAMAGE = (  # what a wrong number, word or kind of value in a file leads to
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def is_file(path: Path) -> bool:
    """Not if its name cannot be one, as when it is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_text(path: Path, fix: str) -> str:
    """The text of a file. `fix` says which file to give instead."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError.of(str(path), f"it cannot be read: {reason(error)}", fix) from None


def write_text(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def printed_to(path: Path | None) -> Iterator[None]:
    """Inside, what is printed goes to a file, if there is one. Its name is printed afterwards."""
    if path is None:
        yield
        return
    with redirect_stdout(io.StringIO()) as text:
        yield
    write_text(path, text.getvalue())
    print(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, a file is written."""
    try:
        yield
    except OSError as error:
        raise InputError.of(str(path), f"it cannot be written: {reason(error)}", WRITE) from None


def read_as(path: Path, parse: Callable[[str], Read], fix: str) -> Read:
    """What a file says. `parse` may fail in any way of a parser."""
    text = read_text(path, fix)
    with damage_reported(path, fix):
        return parse(text)


@contextmanager
def damage_reported(path: Path, fix: str) -> Iterator[None]:
    """Inside, only what a file says can be wrong."""
    try:
        yield
    except DAMAGE as error:
        what = f"part of it is missing or damaged ({type(error).__name__}: {error})"
        raise InputError.of(str(path), what, fix) from None


def reason(error: Exception) -> str:
    """
    >>> reason(FileNotFoundError(2, "No such file or directory", "a"))
    'No such file or directory'
    """
    return getattr(error, "strerror", None) or str(error)
