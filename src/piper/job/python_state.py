"""The Python state of the model and the loss, as all processes know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from piper.capture import (
    Captured,
    Outside,
    Stop,
    Visit,
    Watch,
    refuse_remembered,
    refuse_remembered_states,
)
from piper.capture.python_state.loss_state import OWNER, loss_buffers
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.python_state.tensor_attributes import refuse_given
from piper.capture.torch_private import version_of
from piper.job.loop.around_step import changed


@dataclass
class PythonState:
    """The first process captures, so its state counts. The others learn it in each step."""

    watch: Watch | None = None  # since the first capture, where the model is captured
    agreed: int = 0  # elsewhere
    visits: dict[int, list[Visit]] = field(default_factory=dict)  # by state
    of_loss: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # as they were at first
    stops: list[Stop] = field(default_factory=list)  # the first visit in each state

    def now(self) -> int:
        """A number for the state. It is 0 until something changes."""
        return self.agreed if self.watch is None else self.watch.now()

    def settle(self) -> None:
        """Before what was trained is used: an error if a step missed what a loop had written."""
        if self.watch is not None:
            self.watch.settle()

    def refuse_attributes(self, tensors: Iterable[Tensor]) -> None:
        """Of the tensors of a batch, where it is known what the model's code reads."""
        if self.watch is not None:
            refuse_given(tensors, self.watch.reach)
            self.refuse_loss_writes(self.watch.given[1])

    def refuse_loss_writes(self, loss_fn: Any) -> None:
        """Buffers of a loss that it updates itself: training has its own, as those of a model."""
        visits = (visit for each in self.visits.values() for visit in each)
        carried = {name for visit in visits for name in visit.carried_by_loss}
        for name, one in loss_buffers(loss_fn).items() if carried else ():
            tensor, version = self.of_loss.setdefault(name, (one, version_of(one)))
            if name in carried and (one is not tensor or version_of(one) != version):
                raise changed(f"loss_fn{name.removeprefix(OWNER)}")

    def captured(self, model: nn.Module, loss_fn: Any, capture: Callable[[], Captured]) -> Captured:
        """Capture, and watch from then on what was read."""
        outside = Outside() if self.watch is None else self.watch.outside
        with outside.recording(), outside.unwritten():
            made = capture()
        if self.watch is None:
            self.watch = Watch(model, loss_fn, outside)
        self.see(model, made.visit)
        self.refuse_loss_writes(loss_fn)
        return made

    def see(self, model: nn.Module, new: Visit) -> None:
        """One more kind of batch, which must not change what the model computes for others."""
        before = self.visits.setdefault(self.now(), [])
        if new not in before:
            refuse_remembered(model, before, new)
            if self.watch is not None:
                elsewhere = tuple(self.watch.elsewhere())
                stop = Stop(new, Snapshot(self.watch.reach), elsewhere)
                given = self.watch.reach, self.stops, stop
                self.stops = refuse_remembered_states(model, *given)
            before.append(new)
