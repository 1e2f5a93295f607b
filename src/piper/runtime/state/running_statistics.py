"""Running statistics of several replicas: each has its own, and those of the first count.

DistributedDataParallel gives all replicas the buffers of the first before each forward. No forward
in training reads running statistics, so it is enough to do so before something else reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from piper.names import Device
from piper.runtime.hardware import settle
from piper.runtime.processes.gathering import everyone
from piper.runtime.state.device_state import DeviceState


def take_from_first(state: DeviceState, first: Mapping[str, Device], rank: Device) -> None:
    """Take these buffers from the first replica, which is there. All processes call it."""
    settle(state.device)
    held = {
        name: tensor
        for bucket in state.buckets.values() if bucket.pieces is None
        for name, tensor in zip(bucket.names, bucket.tensors, strict=True) if name in first
    }  # fmt: skip
    mine = {name: tensor.cpu() for name, tensor in held.items() if first[name] == rank}
    for theirs in everyone(mine, "the running statistics of the first replica"):
        for name in theirs.keys() & held.keys():
            held[name].copy_(theirs[name])
