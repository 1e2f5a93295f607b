"""The user's model, whose trained weights are in the Trainer: whoever uses its own is warned."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from piper.job.loop.callers import callers_level, module_of
from piper.job.loop.idle_optimizers import IdleOptimizers
from piper.job.loop.several_trainers import LOAD, begin
from piper.job.loop.stale_tensors import StaleTensors, clear_all
from piper.job.loop.waiting_model import WaitingModel
from piper.job.processes.consistency import Digests, digests

MESSAGE = (
    "this model still has the weights that it had when the Trainer was made: the Trainer trains "
    "its own copy. Use trainer.evaluate(batches) or trainer.predict(x), or load what is trained "
    f"before trainer.close(): {LOAD}"
)
TENSORS = (
    "the parameters and buffers of this model are older than those that are trained: the Trainer "
    "has its own copy. What a loop computes from them is out of date, and what it writes to them "
    "is not trained. trainer.state_dict() gives the weights of now, Trainer(ema=...) averages "
    "them. Pass what changes between steps with the batch, and compute the rest in the forward"
)
GRADIENTS = (
    "the parameters of this model have no gradients: the Trainer computes those of its own copy, "
    "so clip_grad_norm_ and norms that are logged find none. Write Trainer(max_norm=...) to clip "
    "them; metrics.grad_norm is their norm"
)
CLEARING = ("torch.optim.", "torch.nn.modules.")  # zero_grad(), which a loop may keep
INSIDE = ("piper.trainer", "piper.job.", "piper.capture.", "piper.runtime.", "piper.checkpoint.")


class StaleModel:
    """A hook before the model's forward and state_dict. It warns once, after the first step.

    Uses of single parameters and buffers are warned about, too, until weights are loaded. Copies of
    the model are not watched: Piper traces a copy, and users may keep some.
    """

    changes_inputs = False  # of the forward before which it is called

    def __init__(self, model: torch.nn.Module, taken: Digests, loss_fn: Any = None) -> None:
        self.taken = dict(taken)
        self.training = begin(model, loss_fn, taken, self.settle)
        self.waiting = WaitingModel(model)
        self.tensors = StaleTensors(model, self.tell, self.tell_of_gradients)
        self.idle = IdleOptimizers(model)
        self.handles = [
            model.register_forward_pre_hook(self), model.register_state_dict_pre_hook(self),
            model.register_load_state_dict_pre_hook(Loading(self)),
        ]  # fmt: skip
        self.stepped = self.told = self.closed = self.settled = self.asked = False

    @staticmethod
    def end_marks() -> None:
        """In every call of a Trainer. They begin again after its step."""
        clear_all()

    def after_step(self) -> None:
        self.stepped = True
        self.training.after_step()
        if not self.told:
            self.tensors.mark()

    def tell(self) -> None:
        """Something uses the values of a tensor of the model."""
        if not self.told and not is_inside():
            self.told = True
            self.tensors.clear()
            warnings.warn(TENSORS, stacklevel=callers_level())

    def tell_of_gradients(self) -> None:
        """Something reads a gradient, of which there is none."""
        if not self.asked and not is_inside() and not is_clearing():
            self.asked = True
            warnings.warn(GRADIENTS, stacklevel=callers_level())

    def __call__(self, model: torch.nn.Module, *_: Any) -> None:
        is_old = self.stepped and self.taken and not self.training.loaded
        if is_old and not is_pipers() and not is_inside():
            taken, self.taken = self.taken, {}
            if digests(model) == taken:
                self.told = True
                self.tensors.clear()
                warnings.warn(MESSAGE, stacklevel=callers_level())

    def __deepcopy__(self, _: Any) -> Unwatched:
        return Unwatched()

    def __reduce__(self) -> tuple[type[Unwatched], tuple[()]]:
        return Unwatched, ()

    def settle(self) -> None:
        """Another Trainer of these tensors begins, which watches them from now on."""
        self.told = self.settled = True
        self.tensors.clear()
        if self.closed:
            self.remove()

    def remove(self) -> None:
        """The last hook stays, of a model that was trained: the next Trainer asks what it saw."""
        for handle in self.handles[:-1] if self.stepped and not self.settled else self.handles:
            handle.remove()

    def close(self) -> None:
        """The weights of a model that was trained stay old: who was not told yet will be."""
        self.closed = True
        self.waiting.close()
        self.idle.close()
        if self.told or not self.stepped:
            self.tensors.clear()
            self.remove()


@dataclass(frozen=True)
class Loading:
    """A hook before weights are loaded into the model: they are those that the user wants."""

    watch: StaleModel

    def __call__(self, *_: Any) -> None:
        self.watch.tensors.clear()
        self.watch.training.loaded = True

    def __deepcopy__(self, _: Any) -> Unwatched:
        return Unwatched()

    def __reduce__(self) -> tuple[type[Unwatched], tuple[()]]:
        return Unwatched, ()


def is_inside() -> bool:
    """Whether a call of Piper is going on, which may run code of the model, or the model moves."""
    frame: FrameType | None = sys._getframe(2)
    while frame and not is_call(frame):
        frame = frame.f_back
    return frame is not None


def is_call(frame: FrameType) -> bool:
    """What starts a user's code does not count."""
    module = module_of(frame)
    if module.endswith((".launching", ".stale_tensors")):
        return False
    moves = module == torch.nn.Module.__module__ and frame.f_code.co_name == "_apply"
    return moves or f"{module}.".startswith(INSIDE)


def is_clearing() -> bool:
    """Whether torch reads a gradient of which it wants to get rid, or with which it steps."""
    reader = sys._getframe(3)  # below are tell_of_gradients and the function of a stale tensor
    return module_of(reader).startswith(CLEARING)


def is_pipers() -> bool:
    """Whether Piper itself reads the model, say for the names of its state."""
    frame: FrameType | None = sys._getframe(2)
    while frame and module_of(frame).startswith(("torch.",)):
        frame = frame.f_back
    return frame is not None and module_of(frame).startswith(("piper.",))


class Unwatched:
    """The hook of a copy, which does nothing."""

    changes_inputs = False  # of the forward before which it is called

    def __call__(self, model: torch.nn.Module, *_: Any) -> None: ...
