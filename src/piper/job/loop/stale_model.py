"""The user's model, whose trained weights are in the Trainer: calls and saves are warned about."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch

from piper.job.loop.waiting_model import WaitingModel
from piper.job.processes.consistency import Digests, digests

MESSAGE = (
    "this model still has the weights that it had when the Trainer was made: the Trainer trains "
    "its own copy. Use trainer.evaluate(batches), trainer.predict(x) or trainer.state_dict(). All "
    "processes call these, and the first one gets the weights: `weights = trainer.state_dict()`, "
    "`if weights is not None: model.load_state_dict(weights)`"
)


class StaleModel:
    """A hook before the model's forward and state_dict. It warns once, after the first step.

    Copies of the model are not watched: Piper traces a copy, and users may keep some.
    """

    def __init__(self, model: torch.nn.Module, taken: Digests) -> None:
        self.taken = dict(taken)
        self.waiting = WaitingModel(model)
        self.handles = [
            model.register_forward_pre_hook(self), model.register_state_dict_pre_hook(self)
        ]  # fmt: skip
        self.stepped = False

    def __call__(self, model: torch.nn.Module, *_: Any) -> None:
        if self.stepped and self.taken and not is_pipers():
            taken, self.taken = self.taken, {}
            if digests(model) == taken:
                warnings.warn(MESSAGE, stacklevel=callers_level())

    def __deepcopy__(self, _: Any) -> Unwatched:
        return Unwatched()

    def __reduce__(self) -> tuple[type[Unwatched], tuple[()]]:
        return Unwatched, ()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.waiting.close()


def callers_level() -> int:
    """How many frames above the hook the user's call is: torch has several in between."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and module_of(frame).startswith(("torch.", "piper.")):
        frame, level = frame.f_back, level + 1
    return level


def is_pipers() -> bool:
    """Whether Piper itself reads the model, say for the names of its state."""
    frame: FrameType | None = sys._getframe(2)
    while frame and module_of(frame).startswith(("torch.",)):
        frame = frame.f_back
    return frame is not None and module_of(frame).startswith(("piper.",))


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class Unwatched:
    """The hook of a copy, which does nothing."""

    def __call__(self, model: torch.nn.Module, *_: Any) -> None: ...
