"""What a forward reads from outside of the program: environment variables and files."""

import builtins
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

from piper.capture.refusals import refusal
from piper.capture.source_lines import current_line, is_capture, is_pythons, is_torchs
from piper.errors import CaptureError

_CHANGING = ("/proc/", "/sys/", "/dev/")  # no files: they differ whenever they are read
_WRITTEN = os.O_WRONLY | os.O_RDWR

_LOADING = ("serialization.py", "hub.py")  # of torch: torch.load reads for the user

Seen = Callable[..., Any]
Signature = tuple[int, ...] | None  # None: there is no such file


@dataclass
class Outside:
    """What was read in captures, as it was then."""

    variables: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, Signature] = field(default_factory=dict)

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """An error if a forward changes a variable or a file that it reads: a counter, say."""
        known = {*self.changes()}
        yield
        for what in (one for one, now in self.changes() if (one, now) not in known):
            raise changed_elsewhere(what)

    def changes(self) -> Iterator[tuple[str, str]]:
        """What differs now, as text."""
        for name, before in self.variables.items():
            if (now := os.environ.get(name)) != before:
                yield f"os.environ[{name!r}]", repr(now)
        for path, signature in self.files.items():
            if (found := signature_of(path)) != signature:
                yield f"the file {path}", repr(found)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Remember what the user's code reads inside."""
        here, environ = get_ident(), type(os.environ)
        with ExitStack() as stack:
            for owner, name, seen in self.watched():
                stack.enter_context(_replaced(owner, name, partial(_also, seen, here)))
            stack.enter_context(_replaced(environ, "__getitem__", partial(self.read, here)))
            yield

    def watched(self) -> list[tuple[Any, str, Seen]]:
        """Functions that read files, and what to remember of their arguments."""
        opened: list[tuple[Any, str, Seen]] = [
            (one, "open", self.see_open) for one in (builtins, io)
        ]
        asked = [(os, name, self.see_file) for name in ("stat", "listdir", "scandir")]
        return [*opened, *asked, (os, "open", self.see_flags)]

    def read(self, thread: int, original: Callable[..., Any], environ: Any, name: Any) -> Any:
        """Read a variable, and remember it."""
        found: Any = None
        try:
            found = original(environ, name)
            return found
        finally:
            if get_ident() == thread and (known := name_in(environ, name)) and _is_users():
                self.variables.setdefault(known, None if found is None else os.fsdecode(found))

    def see_open(self, path: Any, mode: str = "r", *_: Any, **__: Any) -> None:
        if not set(mode) & set("wax+"):
            self.see_file(path)

    def see_flags(self, path: Any, flags: int, *_: Any, **__: Any) -> None:
        if not flags & _WRITTEN:
            self.see_file(path)

    def see_file(self, path: Any = ".", *_: Any, **__: Any) -> None:
        if not isinstance(path, str | os.PathLike) or not _is_users():
            return
        name = os.path.abspath(os.fspath(path))
        if not str(name).startswith(_CHANGING):
            self.files.setdefault(str(name), signature_of(str(name)))


def name_in(environ: Any, name: Any) -> str | None:
    """The name of a variable as text. None: it is none, or the environment is a copy."""
    if environ is os.environ:
        return name if isinstance(name, str) else None
    in_bytes = environ is getattr(os, "environb", None) and isinstance(name, bytes)
    return os.fsdecode(name) if in_bytes else None


def changed_elsewhere(what: str) -> CaptureError:
    return refusal(
        "model",
        f"its forward changes {what}, which a captured step would not repeat",
        "count in a buffer, or change it in your training loop: Piper reads it in each step",
    )


def signature_of(path: str) -> Signature:
    """Another one if the file was written or replaced."""
    try:
        found = _STAT(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


_STAT = os.stat


def _is_users() -> bool:
    """Whether the user's code reads: torch reads settings of its own, and capture its cache.

    Python looks through folders for a module that is imported, or asked for. That is no file of
    the model.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or is_pythons(frame)):
        if "importlib" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return frame is not None and not _is_own(frame.f_code.co_filename) and bool(current_line())


def _is_own(file: str) -> bool:
    return is_capture(file) or (is_torchs(file) and not file.endswith(_LOADING))


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """`by` gets the original first, and then the arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: by(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _also(seen: Seen, thread: int, original: Seen, *args: Any, **kwargs: Any) -> Any:
    """Tell about the arguments, and go on."""
    if get_ident() == thread:
        seen(*args, **kwargs)
    return original(*args, **kwargs)
