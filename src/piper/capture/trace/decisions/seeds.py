"""Seeds that a forward sets: a captured step draws from the seed of Piper, not from torch's."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

from piper.capture.refusals import refusal
from piper.capture.source_lines import is_another_thread, is_pythons, is_users, short_line
from piper.errors import CaptureError

_SETTING = ("manual_seed", "seed", "set_state")
_ON_GPUS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state",
            "set_rng_state_all")  # fmt: skip
# Torch's files that set a seed on behalf of who called them:
_FILES = ("random.py", "cuda/random.py", "_compile.py", "_dynamo", "utils/_contextlib.py")
_TORCH = os.path.dirname(torch.__file__)
PASSING = (*(os.path.join(_TORCH, one) for one in _FILES), __file__)


@contextmanager
def refusing_seeds() -> Iterator[None]:
    """While this is open, the user's code may not set seeds. Checkpoints of torch may."""
    before = torch.initial_seed()
    with ExitStack() as stack:
        stack.enter_context(_replaced(torch.random, "default_generator", _Guarded))
        for name in _ON_GPUS:
            stack.enter_context(_replaced(torch.cuda, name, partial(partial, _allowed)))
        yield
    if torch.initial_seed() != before:
        raise seed_in_forward("")


@contextmanager
def _replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, made(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Guarded:
    """Torch's generator, whose state only torch sets."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.generator, name)
        return partial(_allowed, found) if name in _SETTING else found


def _allowed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passing(frame):
        frame = frame.f_back
    if not is_another_thread() and frame is not None and is_users(frame.f_code.co_filename):
        raise seed_in_forward(short_line(frame.f_code.co_filename, frame.f_lineno))
    return function(*args, **kwargs)


def _is_passing(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PASSING) or is_pythons(frame)


def seed_in_forward(where: str) -> CaptureError:
    return refusal(
        where,
        "the forward sets the seed of random numbers, or their state, which a captured step does "
        "not have: Piper draws from its own seed, the step and the position in the batch",
        "leave it out, and give the Trainer seed=...; keep numbers that stay the same in a buffer, "
        "and use one mask twice instead of drawing it again",
    )
