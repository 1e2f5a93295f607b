"""Texts that a forward makes of numbers and tensors without values.

They may be printed. Other code could find a layer by such a text, or decide by it: that is refused.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from piper.capture.refusals import refusal
from piper.capture.source_lines import is_pythons, is_users, short_line
from piper.capture.torch_private import FunctionalTensor
from piper.capture.trace.replaced.numbers import NUMBERS
from piper.capture.trace.replaced.printed import is_printed
from piper.errors import CaptureError

# What runs between the user's code and a text:
_MAKING = {"__repr__", "__format__", "__torch_function__", "handle_torch_function", "formatted"}


@contextmanager
def texts_only_printed() -> Iterator[None]:
    kinds: list[Any] = [*NUMBERS, FunctionalTensor]
    originals = [kind.__repr__ for kind in kinds]
    for kind in kinds:
        kind.__repr__ = _watched(kind.__repr__)
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.__repr__ = original


def _watched(original: Any) -> Any:
    def __repr__(self: Any) -> str:
        frame = _asking(sys._getframe(1))
        if frame is not None and not is_printed(frame):
            raise used_text(short_line(frame.f_code.co_filename, frame.f_lineno))
        return str(original(self))

    return __repr__


def _asking(frame: FrameType | None) -> FrameType | None:
    """The user's code that wants a text. None: torch does, or a logger of Python."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        passes = is_pythons(frame) or frame.f_code.co_name in _MAKING
        if not passes or "logging" in frame.f_code.co_filename:
            return None
        frame = frame.f_back
    return frame


def used_text(where: str) -> CaptureError:
    return refusal(
        where,
        "a text is made of the value of a tensor, which differs from batch to batch, and is not "
        "only printed: what code finds or decides by it would stay as it is in the trace",
        "keep the decision in tensors (torch.where, masking, indexing); give a text of a value to "
        "print or to a logger, or make it in your training loop",
    )
