"""What a forward may not remember from batches or states before, and what to write instead."""

from types import CodeType

from piper.capture.refusals import refusal
from piper.capture.source_lines import short_line
from piper.errors import CaptureError


def remembered_shape(where: str, sizes: str, name: str) -> CaptureError:
    return refusal(
        where,
        f"batches of other shapes change {name}, and with it what the model computes for those of "
        f"{sizes}: each shape has a program, and would go on with what the model had at the start",
        "compute it from the shape in each forward, without keeping it; or call the model with "
        "a batch of the longest shape before you make the Trainer; or pad all batches to one "
        "shape",
    )


def remembered_call(where: str, name: str) -> CaptureError:
    """Of a number or a text among the inputs, or of train() and eval()."""
    return refusal(
        where,
        f"batches with other numbers or texts, or in another mode, change {name}, and with it what "
        "the model computes later: each has a program, and would go on with what the model had at "
        "the start",
        "compute it in each forward, without keeping it; or pass numbers as tensors",
    )


def remembered_state(where: str, changed: str, name: str) -> CaptureError:
    return refusal(
        where,
        f"your loop changes {changed}, and a forward changes {name}, which later forwards read "
        "after further changes: each value of the former has a program, and would go on with what "
        "the model had at the start",
        f"compute {name} in each forward, without keeping it; or set it in your loop to its new "
        "value, and not to None",
    )


def cached_state(code: CodeType, changed: str) -> CaptureError:
    return refusal(
        short_line(code.co_filename, code.co_firstlineno),
        f"{code.co_name} remembers its results (functools.lru_cache) and reads {changed}, which "
        "your loop changes: plain PyTorch may go on with an old result, and Piper computes it anew",
        f"give {code.co_name} what it reads as an argument, or do not cache it",
    )
