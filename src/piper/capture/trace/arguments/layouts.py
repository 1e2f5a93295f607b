"""A forward that asks how a tensor of the batch lies in memory, or whether it needs a gradient.

In a captured step these tensors are contiguous and need none. If somebody asks, and a batch
differs, that is an error.
"""

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from piper.capture.source_lines import is_capture, is_users, short_line
from piper.errors import InputError

_ASKED = "piper_asked"  # an attribute of tensors of the batch: the lines that ask
_METHODS = frozenset({
    Tensor.is_contiguous, Tensor.stride, Tensor.as_strided, torch.as_strided,
    Tensor.requires_grad.__get__, Tensor.is_leaf.__get__,
})  # fmt: skip


def listen(batch: Iterable[Tensor], lines: list[str]) -> None:
    """Collect the lines of the user's code that ask."""
    for tensor in batch:
        setattr(tensor, _ASKED, lines)


def hear(func: Any, args: Any) -> None:
    """A call of torch, which may ask."""
    if func in _METHODS and args and (lines := getattr(args[0], _ASKED, None)) is not None:
        lines.extend(_line())


def _line() -> list[str]:
    """The line of the caller, if that is the user's code, and not torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_on_the_way(frame):
        frame = frame.f_back
    if frame is None or not is_users(frame.f_code.co_filename):
        return []
    return [short_line(frame.f_code.co_filename, frame.f_lineno)]


def _is_on_the_way(frame: FrameType) -> bool:
    """Modes of torch run between the model and torch."""
    return is_capture(frame.f_code.co_filename) or frame.f_code.co_name == "__torch_function__"


def refuse_asked(tensors: Iterable[Tensor], line: str) -> None:
    """`line` asks for what these tensors do not have in a step."""
    if line and any(one.requires_grad or not one.is_contiguous() for one in tensors):
        raise InputError.of(
            "batch",
            f"{line} asks how a tensor of the batch lies in memory, or whether it needs a gradient"
            ": in a captured step it is contiguous and needs none, and in this batch that differs",
            "pass tensor.detach().contiguous(), and what the forward shall do as a number",
        )
