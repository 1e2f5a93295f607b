"""Digests of parameters that several devices hold: they must have the same bits on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from piper.errors import ReplicaError
from piper.runtime.processes.gathering import everyone
from piper.runtime.state.checksums import checksums
from piper.runtime.state.device_state import BucketState, DeviceState

EVERY = 100  # steps between two comparisons: each one waits for the device
Held = tuple[str, ...]  # a parameter's name, and which elements of it; or a bucket
Digests = dict[Held, int]


def refuse_drift(state: DeviceState, steps: int, every: int = 1) -> None:
    """Compare what devices have in common, after every so many steps. All processes call it.

    First one number for each bucket, and only if some differ, one for each parameter.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or steps % every:
        return
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)  # steps run on streams of their own
    held = dict(parts_of(state))
    if different(everywhere({bucket: combined(parts) for bucket, parts in held.items()})):
        parts = {name: number for one in held.values() for name, number in one.items()}
        found = different(everywhere(parts))
        if found is not None:
            raise drifted(*found, steps)


def parts_of(state: DeviceState) -> Iterator[tuple[Held, Digests]]:
    """The parts of parameters in each bucket, frozen or not. Equal parts have the same name."""
    buckets = list(state.buckets.values())
    numbers = iter(checksums([part for one in buckets for part in tensors_of(one)]))
    for bucket in buckets:
        names = [
            (part.name, str(part.first), str(part.parameter.numel()), str(part.order))
            for part in bucket.parts()
        ]
        yield (digest_of(repr(names)),), {name: next(numbers) for name in names}


def tensors_of(bucket: BucketState) -> list[torch.Tensor]:
    return [part.parameter for part in bucket.parts()]


def combined(parts: Digests) -> int:
    return int(digest_of(repr(sorted(parts.items()))), 16)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:15]


def everywhere(mine: Digests) -> list[Digests]:
    return everyone(mine, "the comparison of replicated parameters")


def different(found: Sequence[Digests]) -> tuple[Held, int, int] | None:
    """The first part that two devices hold with different bits, and these devices."""
    first: dict[Held, tuple[int, int]] = {}
    for device, theirs in enumerate(found):
        for name, number in theirs.items():
            other, known = first.setdefault(name, (device, number))
            if known != number:
                return name, other, device
    return None


def drifted(part: Held, one: int, other: int, steps: int) -> ReplicaError:
    name, *_ = part
    return ReplicaError.of(
        name,
        f"after step {steps}, it differs between device {one} and device {other}, which are "
        "replicas",
        "give all processes the same options and versions of PyTorch, and test the hardware of "
        "both devices; then resume from the last checkpoint",
    )
