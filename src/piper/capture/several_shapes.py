"""Does a model remember something from batches of one shape that it reads for another?

A program is compiled for each kind of batch, from the Python state that the model has at the start.
In eager training, a forward sees what the batches before it have left: the longest length so far,
a table for it. So if some forward changes Python state, the kinds of batches are traced one after
the other, as in eager training. Each must compute what it computes at the start.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture import refusals
from piper.capture.precision import Precision
from piper.capture.python_state import carried
from piper.capture.python_state.carried import Once
from piper.capture.python_state.constant_values import SameValues, constant_values
from piper.capture.python_state.graph_equality import Numbering, depends_on_inputs, switches
from piper.capture.python_state.loss_state import OWNER, LossCopy
from piper.capture.python_state.places import Place
from piper.capture.python_state.snapshot import Change, Snapshot
from piper.capture.trace.arguments.inputs import Inputs
from piper.capture.trace.arguments.outputs import joined
from piper.capture.trace.forward import Attempt, Traced
from piper.capture.trace.model_copy import acting_as
from piper.errors import CaptureError


@dataclass(frozen=True)
class Visit:
    """A kind of batch for which a model was captured."""

    loss_fn: Any
    inputs: Inputs
    modes: tuple[bool, ...]  # of the modules
    grad: bool
    carried_by_loss: tuple[str, ...]
    remembers: bool  # whether the forward changes Python state that some code reads
    device: str
    precision: Precision | None
    asked: str  # the line that asks for the layout of the batch

    @property
    def size(self) -> int:
        return sum(prod(n or 1 for n in one.shape) for one in self.inputs.tensors)


def visit_of(model: nn.Module, loss_fn: Any, traced: Traced, grad: bool) -> Visit:
    modes = tuple(module.training for module in model.modules())
    buffers = tuple(name for name in traced.buffers if name.startswith(OWNER))
    rest = traced.remembers, traced.device, traced.precision, traced.asked
    return Visit(loss_fn, traced.inputs, modes, grad, buffers, *rest)


def refuse_remembered(model: nn.Module, before: Sequence[Visit], new: Visit) -> None:
    """Refuse a model for which the new kind of batch and those before it are not independent."""
    if before and any(one.remembers for one in (*before, new)):
        Journey(model, [*_some(before), new]).run()


def _some(visits: Sequence[Visit]) -> list[Visit]:
    """A few of many, in the order in which they came: each is traced twice."""
    sizes = [one.size for one in visits]
    kept = {sizes.index(min(sizes)), sizes.index(max(sizes)), len(visits) - 1}
    return [visits[k] for k in sorted(kept)]


class Journey:
    """Traces several kinds of batches, each from the state that the one before has left."""

    def __init__(self, model: nn.Module, visits: Sequence[Visit]) -> None:
        self.visits = visits
        first = next((one for one in visits if one.loss_fn is not joined), visits[0])
        given = first.inputs, first.device, first.precision, first.carried_by_loss
        self.attempt = Attempt(model, first.loss_fn, *given)
        self.losses = {id(first.loss_fn): self.attempt.loss}
        self.numbering, self.same = Numbering(), SameValues()
        self.changes: list[Change] = []  # so far on the way, if some code reads it
        self.known: dict[int, Any] = {}  # what tensors without values are, by id
        self.values: dict[int, Tensor] = {}  # and their values, if they depend on no input
        self.left: list[Place] = []  # keeps these tensors alive

    def run(self) -> None:
        """Those before the last are known not to depend on each other."""
        *before, new = self.visits
        with acting_as(self.attempt.model, self.attempt.view):
            alone, start = self.alone(new), Snapshot(self.attempt.reach)
            try:
                meanings = [self.after(one) for one in before]
                way = [(new, alone), *zip(before, meanings, strict=True)]
                other = next((visit for visit, at in way if self.after(visit) != at), None)
            finally:
                start.restore()
            if other and self.changes and self.alone(new) == alone:  # it is not chance
                raise self.refusal(other)

    def alone(self, visit: Visit) -> Any:
        """What it computes from the state at the start, to which everything returns."""
        once = self.trace(visit)
        try:
            return self.meaning(once)
        finally:
            once.before.restore()

    def after(self, visit: Visit) -> Any:
        """What it computes after all before it on the way. None: it does not even run."""
        try:
            once = self.trace(visit)
        except Exception:
            return None
        meaning, reach = self.meaning(once), self.attempt.reach
        self.changes += [one for one in once.changes if reach.may_read(one.place.names)]
        self.leave(once)
        return meaning

    def trace(self, visit: Visit) -> Once:
        attempt = self.attempt
        if id(visit.loss_fn) not in self.losses:
            copied = LossCopy(visit.loss_fn, attempt.model, visit.carried_by_loss)
            self.losses[id(visit.loss_fn)] = copied
        attempt.inputs, attempt.loss = visit.inputs, self.losses[id(visit.loss_fn)]
        with torch.set_grad_enabled(visit.grad), in_modes(attempt.view, visit.modes):
            return attempt.once()

    def meaning(self, once: Once) -> Any:
        """Equal for traces that compute the same."""
        valued = dict(self.same.keys(constant_values(once.root, self.values)))
        numbers = self.numbering.of(once.root, self.known, valued=valued)
        return once.updated, [numbers[node] for node in once.results], switches(once.root)

    def leave(self, once: Once) -> None:
        """Replace the tensors that a trace left, which end with it, and remember what they are."""
        values = constant_values(once.root, self.values)
        numbers = self.numbering.of(once.root, self.known)
        made = carried.with_new_tensors(once, self.attempt.mode)
        for (address, place), node in zip(made.items(), once.left, strict=True):
            self.left.append(place)
            state = ("state", place.path) if depends_on_inputs(node) else numbers[node]
            self.known[address] = state
            if isinstance(value := values.get(node), Tensor):
                self.values[address] = value

    def refusal(self, visit: Visit) -> CaptureError:
        place = self.changes[0].place
        where = carried.line_of(self.changes[0], self.attempt.reach)
        sizes = ", ".join(str(list(one.shape)) for one in visit.inputs.tensors)
        return refusals.refusal(
            where,
            f"batches of other shapes change {place.path.partition('[')[0]}, and with it what the "
            f"model computes for those of {sizes}: each shape has a program, and would go on with "
            "what the model had at the start",
            "compute it from the shape in each forward, without keeping it; or call the model with "
            "a batch of the longest shape before you make the Trainer; or pad all batches to one "
            "shape",
        )


@contextmanager
def in_modes(view: nn.Module, modes: Sequence[bool]) -> Iterator[None]:
    """With train() or eval() as it was in each module."""
    modules = list(view.modules())
    before = [module.training for module in modules]
    try:
        for module, mode in zip(modules, modes, strict=False):
            module.training = mode
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode
