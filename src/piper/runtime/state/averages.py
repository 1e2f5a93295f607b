"""Exponential moving averages (EMA) of parameters, beside the optimizer of each bucket."""

from __future__ import annotations

from collections.abc import Container, Iterator

from piper.runtime.state.device_state import BucketState, DeviceState
from piper.runtime.torch_private import foreach_lerp_


def advance(state: DeviceState) -> None:
    """After a step that counts: averages follow the parameters, and schedulers go on."""
    average(state)
    state.advance()
    state.kept.look(state.optimizers().values())


def average(state: DeviceState) -> None:
    """Average after a step. The first average is the parameters themselves, as in torch's
    `swa_utils.AveragedModel`.

    Parameters that this step did not use count too: the average of what stands still follows it.
    """
    for bucket in averaged_buckets(state):
        bucket.settle()
        if bucket.averages is None:
            start(bucket)
            continue
        pairs = zip(bucket.averages, bucket.parameters, strict=True)
        now = [parameter.data.to(mean.device) for mean, parameter in pairs]
        if now and state.ema is not None:
            foreach_lerp_(bucket.averages, now, 1 - state.ema)


def start(bucket: BucketState) -> None:
    bucket.averages = [parameter.data.clone() for parameter in bucket.parameters]


def start_late(state: DeviceState, known: Container[str]) -> None:
    """Buckets that a later step is the first to use: they have stood still until now."""
    for value, bucket in state.buckets.items():
        if value not in known and bucket.averaged and bucket.averages is None:
            start(bucket)


def averaged_buckets(state: DeviceState) -> Iterator[BucketState]:
    return (one for one in state.buckets.values() if one.averaged)


def swap(state: DeviceState) -> None:
    """Exchange parameters and averages. Twice restores both, to the bit."""
    for bucket in averaged_buckets(state):
        bucket.settle()
        for parameter, mean in zip(bucket.parameters, bucket.averages or (), strict=False):
            kept = parameter.data.clone()
            parameter.data.copy_(mean)
            mean.copy_(kept)
        bucket.round_masters()
