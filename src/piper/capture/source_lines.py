"""Which line of the user's model a node or an error comes from."""

import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any

import torch

_TORCH = os.path.dirname(torch.__file__)
_CAPTURE = os.path.dirname(os.path.abspath(__file__))
_CALLERS = (_CAPTURE, os.path.join(os.path.dirname(_CAPTURE), "job"))  # run models, have none
_STDLIB = sysconfig.get_paths()["stdlib"]
_TRANSFORMS = [
    os.path.join(_TORCH, "_functorch/vmap.py"),
    os.path.join(_TORCH, "_functorch/eager_transforms.py"),
]
_NESTED = os.path.join(_TORCH, "nested")
_GENERATED = ("<eval_with_key", "<frozen", "<string>", "<fx")

_RUNNERS = tuple(os.path.join(_CAPTURE, one) for one in ("trace/forward.py", "loss/form.py"))
_MODULES = os.path.join(_TORCH, "nn", "modules", "module.py")
_LOSS_CALL = os.path.join(_CAPTURE, "trace", "arguments", "loss_call.py")

UNKNOWN = "model"
LOSS = "loss_fn"


@lru_cache(8192)  # asked for every frame, and for every module of a process
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, Python's or generated, nor one of Piper's callers."""
    if filename.startswith((*_GENERATED, _TORCH, *_CALLERS)):
        return False
    return "site-packages" in filename or not filename.startswith(_STDLIB)


def is_capture(filename: str) -> bool:
    return filename.startswith(_CAPTURE)


def is_torchs(filename: str) -> bool:
    return filename.startswith(_TORCH)


def is_pythons(frame: FrameType) -> bool:
    """Whether Python's own library is running."""
    name = frame.f_code.co_filename
    return name.startswith(("<frozen", _STDLIB)) and "site-packages" not in name


_tracing = list[int]()  # threads that trace, the innermost last


@contextmanager
def only_this_thread() -> Iterator[None]:
    """What a trace replaces is replaced for all threads. Code of the others is not the model's."""
    _tracing.append(get_ident())
    try:
        yield
    finally:
        _tracing.pop()


def is_another_thread() -> bool:
    """Whether this thread is not the one that traces, such as that of a loader."""
    return bool(_tracing) and _tracing[-1] != get_ident()


def current_line() -> str:
    """The innermost line of the user's model that is running now.

    Empty if Piper itself is running: the next user's line is then the one that called it, which
    has nothing to do with the model.
    """
    frame = None if is_another_thread() else _running_frame()
    return "" if frame is None else short_line(frame.f_code.co_filename, frame.f_lineno)


def _running_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_CALLERS):
        frame = frame.f_back
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_CALLERS) and not _is_passed_through(frame):
            return None
        frame = frame.f_back
    return frame


def frames_of_model() -> list[FrameType]:
    """The functions of the user's model that run now, from the innermost one."""
    frame: FrameType | None = sys._getframe(1)
    found = list[FrameType]()
    while frame is not None and frame.f_code.co_filename not in _RUNNERS:
        if is_users(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return [] if frame is None else found


@contextmanager
def warnings_at_users_lines() -> Iterator[None]:
    """A warning of torch names the line of the model, rather than that of Piper between both."""
    before = warnings.showwarning

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        frame = _running_frame() if filename.startswith(_CALLERS) else None
        if frame is not None:
            filename, lineno = frame.f_code.co_filename, frame.f_lineno
        before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _is_passed_through(frame: FrameType) -> bool:
    """A mode runs between the model and torch, and so does what calls it."""
    return frame.f_code.co_name in (
        "__torch_function__", "__torch_dispatch__", "handle_torch_function",
    )  # fmt: skip


def line_of(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in an error's traceback.

    If there is none, as in a loss function of torch: which argument of the Trainer has failed.
    """
    lines = [
        short_line(frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(trace)
        if is_users(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else LOSS if is_in_loss(trace) else UNKNOWN


def is_in_loss(trace: TracebackType | None) -> bool:
    """Whether the loss function raised an error."""
    return any(frame.f_code.co_filename == _LOSS_CALL for frame, _ in traceback.walk_tb(trace))


def loss_arguments(trace: TracebackType | None) -> tuple[Any, Any] | None:
    """The output and the labels that the loss function was given. None: it did not raise it."""
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_filename == _LOSS_CALL:
            return frame.f_locals["output"], frame.f_locals["labels"]
    return None


def is_in_model(trace: TracebackType | None) -> bool:
    """Whether a module was running."""
    return any(frame.f_code.co_filename == _MODULES for frame, _ in traceback.walk_tb(trace))


def is_transformed(trace: TracebackType | None) -> bool:
    """Whether the user's code called one of torch.func's transforms on the way to an error."""
    return any(name in _TRANSFORMS for name in called_files(trace))


def is_nested(trace: TracebackType | None) -> bool:
    """Whether the user's code made a nested tensor on the way to an error."""
    return any(name.startswith(_NESTED) for name in called_files(trace))


def called_files(trace: TracebackType | None) -> list[str]:
    """From the first file of the user's code on."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    first = next((k for k, name in enumerate(files) if is_users(name)), len(files))
    return files[first:]


def short_line(filename: str, number: int) -> str:
    """A file of a library is named with its package: the user does not know it.

    >>> short_line("/home/ada/train.py", 3)
    'train.py:3'
    >>> short_line("/env/lib/python3.12/site-packages/transformers/models/t5/modeling_t5.py", 7)
    'transformers/.../modeling_t5.py:7'
    """
    _, installed, inside = filename.rpartition(f"site-packages{os.sep}")
    package, *folders, name = inside.split(os.sep) if os.sep in inside else ("", filename)
    path = [package, *(["..."] if folders else []), name]
    return f"{'/'.join(path) if installed and package else os.path.basename(filename)}:{number}"
