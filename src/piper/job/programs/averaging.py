"""The averages of parameters in place of the parameters, for evaluation and export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from piper.errors import InputError
from piper.job.programs.programs import Programs
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.hardware import settle
from piper.runtime.movement.movement import move
from piper.runtime.processes.world import world
from piper.runtime.state.averages import swap
from piper.runtime.state.device_state import DeviceState

# What uses weights, and changes nothing.
INSIDE = ("evaluate", "predict", "gather", "state_dict", "export", "save_pretrained")


@dataclass
class Averaging:
    """Whether a Trainer has its averages where its parameters are otherwise."""

    inside: bool = False

    def refuse(self, call: str) -> None:
        """Inside, weights are only read."""
        if self.inside and call not in INSIDE:
            fix = f"call {call} after the `with`; inside, there may be {', '.join(INSIDE)}"
            raise InputError.of(call, "it was called inside `with trainer.averaged()`", fix)

    @contextmanager
    def swapped(self, programs: Programs, peers: Peers) -> Iterator[None]:
        if programs.state.ema is None:
            fix = "write Trainer(..., ema=0.999)"
            raise InputError.of("averaged", "this Trainer keeps no averages", fix)
        with averages_everywhere(programs, peers):
            self.inside = True
            try:
                yield
            finally:
                self.inside = False


@contextmanager
def averages_everywhere(programs: Programs, peers: Peers) -> Iterator[None]:
    """Inside, the averages are where the parameters were, on all devices."""
    state = programs.state
    copies = DeviceState(state.device, {
        value: one for value, one in state.buckets.items() if one.trained and one.optimizer is None
    })  # fmt: skip
    settle(state.device)
    kept = {value: [t.clone() for t in one.tensors] for value, one in copies.buckets.items()}
    swap(state)
    try:
        if world() > 1:  # copies of parameters on other devices, as for tied weights
            move(peers, state, programs.turns, copies)
        yield
    finally:
        settle(state.device)
        swap(state)
        for value, one in copies.buckets.items():
            for tensor, before in zip(one.tensors, kept[value], strict=True):
                tensor.copy_(before)
