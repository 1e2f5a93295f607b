"""Memory that runs out while a Trainer is made: how much of its plan is there, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piper.errors import RunError, is_out_of_memory
from piper.job.compile.assignment import Assignment
from piper.names import amount
from piper.runtime.state.device_state import DeviceState
from piper.runtime.step_errors import mebibytes

FIX = (
    "divide the parameters over more devices (zero=3, or more stages), offload the optimizer, or "
    "use a smaller precision; `piper show` says what each device holds"
)


@contextmanager
def memory_explained(mine: Assignment, state: DeviceState) -> Iterator[None]:
    """Inside, an error of an allocation says what the plan keeps on this device."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = f"out of memory: {kept_text(mine, state)}\n  {type(error).__name__}: {error}"
        where = "the making of the Trainer, before the first step"
        raise RunError(mine.plan.device, where, f"{reason}\n  fix: {FIX}") from error


def kept_text(mine: Assignment, state: DeviceState) -> str:
    """What is there of the parameters of a plan. Optimizers of torch add to them in a step."""
    wanted = sum(map(int, kept_bytes(mine)))
    made = sum(tensor.nbytes for one in state.buckets.values() for tensor in one.tensors)
    buckets, regions = len(mine.plan.states), len(mine.part.regions)
    return (
        f"the plan keeps {mebibytes(wanted)} of parameters and buffers here, in "
        f"{amount(buckets, 'bucket')} of {amount(regions, 'region')}; {mebibytes(made)} of them "
        "were there; gradients, activations and the state of the optimizer come later"
    )


def kept_bytes(mine: Assignment) -> Iterator[float]:
    """The bytes of each bucket of the plan, or of the part that this device holds."""
    for state in mine.plan.states:
        for _, shape, dtype in mine.part.contents[state.bucket]:
            size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            yield size / (state.ways * state.shares)
