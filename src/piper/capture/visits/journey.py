"""Does a model remember something from batches of one kind that it reads for another?

A program is compiled for each kind of batch, and for each state that the training loop gives the
model, from what the forward finds at the start. In eager training, a forward sees what those before
it have left: the longest length so far, a table for it, the last epoch. So if some forward changes
Python state, the kinds are traced one after the other, as in eager training. Each must compute what
it computes at the start.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.precision import Precision
from piper.capture.python_state import carried
from piper.capture.python_state.carried import Once
from piper.capture.python_state.constant_values import SameValues, constant_values
from piper.capture.python_state.function_caches import forgetting, function_caches
from piper.capture.python_state.graph_equality import Numbering, depends_on_inputs, switches
from piper.capture.python_state.loss_state import OWNER, LossCopy
from piper.capture.python_state.ownership import codes_of
from piper.capture.python_state.places import ABSENT, Place, put
from piper.capture.python_state.reach import Reach
from piper.capture.python_state.snapshot import Change, Key, Snapshot
from piper.capture.trace.arguments.inputs import Inputs
from piper.capture.trace.arguments.outputs import joined
from piper.capture.trace.forward import Attempt, Traced
from piper.capture.trace.model_copy import acting_as
from piper.capture.visits.refusals import (
    cached_state,
    remembered_call,
    remembered_shape,
    remembered_state,
)
from piper.errors import CaptureError

LOG = logging.getLogger("piper")
ANEW = (
    "%s changed, and the forward keeps what it once computed: plain PyTorch goes on with that, and "
    "Piper computes it anew; compute it in each forward, without keeping it"
)


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


@dataclass(frozen=True, eq=False)
class Stop:
    """A visit, with the state that the loop had given the model then. None: that of now."""

    visit: Visit
    state: Snapshot | None = None
    elsewhere: tuple[tuple[str, str], ...] = ()  # what was changed outside of Python then


def refuse_remembered(model: nn.Module, before: Sequence[Visit], new: Visit) -> None:
    """Refuse a model for which the new kind of batch and those before it are not independent."""
    if before and any(one.remembers for one in (*before, new)):
        Journey(model, [Stop(one) for one in (*_some(before), new)]).run()


def refuse_remembered_states(
    model: nn.Module, reach: Reach, before: Sequence[Stop], new: Stop
) -> list[Stop]:
    """Refuse a model for which a state that the loop gave it matters in a later one.

    Gives the stops that the next one is compared with: the first, those that left something for
    others, and this one.
    """
    stops = [*before, new]
    if not before:
        return stops
    refuse_cached([one.state for one in stops if one.state is not None], reach)
    if not any(one.visit.remembers for one in stops):
        return [stops[0], new]
    for name, _ in [*{*new.elsewhere} ^ {*before[-1].elsewhere}][:1]:
        LOG.warning(ANEW, name)
    if not differing([one.state for one in stops if one.state is not None]):
        return stops  # other kinds of batches are compared elsewhere
    journey = Journey(model, stops)
    journey.run()
    return [one for one in stops if one in (stops[0], new) or one in journey.leaving]


def refuse_cached(states: Sequence[Snapshot], reach: Reach) -> None:
    """Functions that remember their results, and read what the loop has changed."""
    keys = differing(states)
    places = [one.places[key] for one in states for key in keys if key in one.places]
    changed = {name for place in places for name in place.names[-1:]}
    for cache in function_caches():
        code = getattr(cache.__wrapped__, "__code__", None)
        if code is None or not reach.reads([cache.__name__]):
            continue
        read = {name for one in codes_of(code) for name in (*one.co_names, *one.co_freevars)}
        if found := sorted(changed & read):
            raise cached_state(code, found[0])


def _some(visits: Sequence[Visit]) -> list[Visit]:
    """A few of many, in the order in which they came: each is traced twice."""
    sizes = [one.size for one in visits]
    kept = {sizes.index(min(sizes)), sizes.index(max(sizes)), len(visits) - 1}
    return [visits[k] for k in sorted(kept)]


class Journey:
    """Traces several kinds of batches, each from the state that the one before has left."""

    def __init__(self, model: nn.Module, stops: Sequence[Stop]) -> None:
        self.stops, visits = stops, [one.visit for one in stops]
        first = next((one for one in visits if one.loss_fn is not joined), visits[0])
        given = first.inputs, first.device, first.precision, first.carried_by_loss
        self.attempt = Attempt(model, first.loss_fn, *given)
        self.losses = {id(first.loss_fn): self.attempt.loss}
        self.numbering, self.same = Numbering(), SameValues()
        self.set_by_loop = differing([one.state for one in stops if one.state is not None])
        self.changes: list[Change] = []  # so far on the way, if some code reads it
        self.known: dict[int, Any] = {}  # what tensors without values are, by id
        self.values: dict[int, Tensor] = {}  # and their values, if they depend on no input
        self.left: list[Place] = []  # keeps these tensors alive
        self.leaving: list[Stop] = []  # which changed something that some code reads

    def run(self) -> None:
        """Those before the last are known not to depend on each other."""
        alone, other = self.travel()
        if other is None or not (self.changes or self.set_by_loop):
            return
        again = Journey(self.attempt.model, self.stops)
        again.numbering, again.same = self.numbering, self.same
        if again.alone(self.stops[-1]) == alone:  # it is not chance
            raise self.refusal(other)

    def travel(self) -> tuple[Any, Stop | None]:
        """What the last one computes alone, and the first that is another one on the way."""
        *before, new = self.stops
        alone = self.alone(new)
        with acting_as(self.attempt.model, self.attempt.view), forgetting():
            start = Snapshot(self.attempt.reach)
            try:
                meanings = [self.after(one) for one in before]
                way = [(new, alone), *zip(before, meanings, strict=True)]
                return alone, next((stop for stop, at in way if self.after(stop) != at), None)
            finally:
                start.restore()

    def alone(self, stop: Stop) -> Any:
        """What it computes from the state at the start, to which everything returns."""
        with acting_as(self.attempt.model, self.attempt.view), forgetting():
            once = self.trace(stop)
            try:
                return self.meaning(once)
            finally:
                once.before.restore()

    def after(self, stop: Stop) -> Any:
        """What it computes after all before it on the way. None: it does not even run."""
        try:
            once = self.trace(stop)
        except Exception:
            return None
        meaning, reach = self.meaning(once), self.attempt.reach
        changes = [one for one in once.changes if reach.may_read(one.place.names)]
        self.changes += changes
        self.leaving += [stop] if changes else []
        self.leave(once)
        return meaning

    def trace(self, stop: Stop) -> Once:
        attempt, visit = self.attempt, stop.visit
        if stop.state is not None:
            self.enter(stop.state)
        if id(visit.loss_fn) not in self.losses:
            copied = LossCopy(visit.loss_fn, attempt.model, visit.carried_by_loss)
            self.losses[id(visit.loss_fn)] = copied
        attempt.inputs, attempt.loss = visit.inputs, self.losses[id(visit.loss_fn)]
        with torch.set_grad_enabled(visit.grad), in_modes(attempt.view, visit.modes):
            return attempt.once()

    def enter(self, state: Snapshot) -> None:
        """Give the copy what the loop had given the model."""
        here = Snapshot(self.attempt.reach).places
        for key in self.set_by_loop:
            place, then = here.get(key), state.places.get(key)
            if place is not None:  # otherwise, it is only in what the user has
                put(place.container, place.key, ABSENT if then is None else then.value)

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

    def refusal(self, stop: Stop) -> CaptureError:
        place = self.changes[0].place if self.changes else None
        where = carried.line_of(self.changes[0], self.attempt.reach) if self.changes else ""
        name = place.path.partition("[")[0] if place else "what it keeps"
        if self.set_by_loop:
            return remembered_state(where, self.set_by_loop[0][0], name)
        if len({shapes_of(one) for one in self.stops}) == 1:
            return remembered_call(where, name)
        return remembered_shape(where, ", ".join(str(list(one)) for one in shapes_of(stop)), name)


def shapes_of(stop: Stop) -> tuple[tuple[int | None, ...], ...]:
    return tuple(tuple(one.shape) for one in stop.visit.inputs.tensors)


def differing(states: Sequence[Snapshot]) -> list[Key]:
    """The places that the loop has changed between these states."""
    every = dict.fromkeys(key for one in states for key in one.tokens)
    return [key for key in every if len({repr(one.tokens.get(key)) for one in states}) > 1]


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
