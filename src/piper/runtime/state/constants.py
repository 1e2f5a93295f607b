"""Buffers that a loss divides by, such as class weights, must stay as they were at the compile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from piper.errors import InputError
from piper.runtime.state.device_state import DeviceState, HeldPart


def keep_constant(
    state: DeviceState, names: Collection[str], initial: Callable[[str], torch.Tensor]
) -> None:
    """Weights of microbatches are computed with the first values of these buffers."""
    state.constants.update({name: initial(name) for name in names if name not in state.constants})
    refuse_other_values(state)


def refuse_other_values(state: DeviceState) -> None:
    """What was loaded may have other values."""
    for part in constant_parts(state):
        first, count = part.first, part.parameter.numel()
        expected = part.order.flat(state.constants[part.name])[first : first + count]
        found = part.parameter.detach().flatten()
        if not torch.equal(found.cpu(), expected.to(found.dtype).cpu()):
            raise InputError.of(
                "load",
                f"the loss divides by {part.name} (class weights, for instance), which has other "
                "values in what was loaded than in the model that the Trainer was made with",
                f"give the model these values of {part.name} before you make the Trainer; or keep "
                "them out of checkpoints: register_buffer(..., persistent=False)",
            )


def constant_parts(state: DeviceState) -> Iterator[HeldPart]:
    """What this device has of such buffers."""
    for bucket in state.buckets.values():
        if not state.constants.keys().isdisjoint(bucket.names):
            yield from (part for part in bucket.parts() if part.name in state.constants)
