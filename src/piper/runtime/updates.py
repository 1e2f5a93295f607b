"""The update of a bucket by its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piper.plan.instructions import Update
from piper.runtime.batch import StepInputs
from piper.runtime.gradient_norm import as_tuple, square
from piper.runtime.optimizers.known_optimizers import is_elementwise
from piper.runtime.state.assigned_parameters import memory_kept, refuse_aliases
from piper.runtime.state.device_state import BucketState, DeviceState
from piper.runtime.state.loss_scale import ready
from piper.runtime.state.offloaded_parameters import updating
from piper.runtime.state.partial_steps import step
from piper.runtime.torch_private import has_own_step


class Stepping(Protocol):
    """What an update needs of the program that it belongs to."""

    slots: list[Any]
    squares: dict[int, torch.Tensor]
    totals: torch.Tensor
    batch: StepInputs
    state: DeviceState

    def slot(self, value: str) -> int: ...
    def watch(self, bucket: BucketState) -> None: ...


@dataclass(frozen=True, slots=True)
class BucketUpdate:
    """The update of one bucket."""

    program: Stepping
    update: Update
    bucket: BucketState
    counts: bool  # whether the norm of its gradients is wanted later

    def __call__(self) -> None:
        grads = self.gradients()
        if grads is None:
            return
        with updating(self.bucket, grads, self.fetched):
            optimizer = self.bucket.optimizer
            if optimizer is not None and self.is_allowed:
                with memory_kept(optimizer, self.bucket.parameters):
                    step(self.bucket)
                if self.bucket.on_host or self.bucket.optimizer_on_host:
                    refuse_aliases(optimizer, self.bucket.parameters)
                self.bucket.round_masters()
            self.program.watch(self.bucket)

    def gradients(self) -> list[torch.Tensor] | None:
        """For the optimizer: unscaled and clipped. None if the step must be skipped."""
        program, slot = self.program, self.program.slot(self.update.grad)
        grads = as_tuple(program.slots[slot])
        if self.counts:  # now: an optimizer may change the gradients
            program.squares[slot] = square(grads)
        own = self.bucket.gradients(grads)
        given = own, program.totals, program.batch.max_norm, program.state.loss_scale
        return None if self.update.clip and not ready(*given) else own

    @property
    def fetched(self) -> Any:
        """The parameters that were copied from host memory, if any."""
        name = self.update.parameters
        return self.program.slots[self.program.slot(name)] if name else None

    @property
    def is_allowed(self) -> bool:
        return self.program.batch.allows(self.program.totals)

    @property
    def can_join(self) -> bool:
        """Whether torch.optim does the same for several buckets at once, in no more memory."""
        optimizer = self.bucket.optimizer
        if optimizer is None or self.update.optimizer or self.update.parameters:
            return False
        fused = all(group.get("fused") for group in optimizer.param_groups)
        lean = self.bucket.device.type == "cpu" or fused  # foreach copies all parameters at once
        return lean and is_elementwise(type(optimizer)) and not has_own_step(optimizer)
