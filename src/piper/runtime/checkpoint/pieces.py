"""The pieces of tensors that a device writes."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from piper.names import with_article
from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.index import NUMBER, PARAMETER, WHOLE, Piece
from piper.runtime.hardware import settle
from piper.runtime.optimizers.user_optimizer import settings
from piper.runtime.state.device_state import BucketState, DeviceState, HeldPart

LOG = logging.getLogger("piper")
EMA = "piper.ema"  # averages are saved like a state of the optimizer
STEP = "step"  # a count, in torch's optimizers; may have the shape of a one-element parameter
CHUNK = 1 << 25  # bytes of a piece: a reader of some reads all of them, to compare the digest
Turns = Mapping[str, tuple[int, int]]  # of a state: which of the devices that hold it, of how many
Pieces = list[tuple[Piece, torch.Tensor]]


@dataclass
class Shifts:
    """Devices that hold the same write it in shifts: the one with least to do writes next."""

    position: int
    loads: list[int]

    def is_mine(self, size: int) -> bool:
        least = self.loads.index(min(self.loads))
        self.loads[least] += max(size, 1)
        return least == self.position


def saved_pieces(state: DeviceState, turns: Turns) -> Pieces:
    """What this device writes: its parameters, buffers and optimizer states, without a copy."""
    settle(state.device)
    found = []
    for value, bucket in state.buckets.items():
        if value in turns:
            refuse_counting(bucket)
            shifts = shifts_of(bucket, *turns[value])
            for piece, tensor in bucket_pieces(bucket):
                if shifts.is_mine(tensor.numel() * tensor.element_size()):
                    found.append((piece, tensor))
    return found


def shifts_of(bucket: BucketState, position: int, count: int) -> Shifts:
    """Not the same device is the first for every bucket."""
    return Shifts((position + zlib.crc32(bucket.bucket.encode())) % count, [0] * count)


def bucket_pieces(bucket: BucketState) -> Iterator[tuple[Piece, torch.Tensor]]:
    for part in bucket.parts():
        yield from chunks(part, "", part.parameter.data)
        yield from optimizer_pieces(bucket, part)


def chunks(
    part: HeldPart, state: str, tensor: torch.Tensor
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """A tensor of the part's shape, in pieces that are not too long."""
    flat = tensor.detach().reshape(-1)
    size = max(CHUNK // flat.element_size(), 1)
    for at in range(0, max(flat.numel(), 1), size):
        yield Piece(part.name, PARAMETER, state, part.first + at, part.order), flat[at : at + size]


def optimizer_pieces(bucket: BucketState, part: HeldPart) -> Iterator[tuple[Piece, torch.Tensor]]:
    """A state with its parameter's shape is cut like it. Others (a step count) stay whole."""
    name, parameter = part.name, part.parameter
    held = bucket.optimizer.state.get(parameter, {}) if bucket.optimizer is not None else {}
    means = zip(bucket.parameters, bucket.averages or (), strict=False)
    for mean in (mean for one, mean in means if one is parameter):
        yield from chunks(part, EMA, mean)
    for state, value in held.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and state != STEP:
            yield from chunks(part, state, value)
        elif isinstance(value, torch.Tensor):
            yield Piece(name, WHOLE, state), value.detach()
        elif isinstance(value, bool | int | float):
            kind = torch.float64 if isinstance(value, float) else torch.int64
            yield Piece(name, NUMBER, state), torch.tensor(value, dtype=kind)
        elif value is not None:
            raise refused(
                f"the optimizer's {state!r} of {name} is {with_article(type(value).__name__)}",
                "use an optimizer that keeps only tensors and numbers",
            )


def refuse_counting(bucket: BucketState) -> None:
    """A count in a group belongs to no parameter, so it would start again after `resume`.

    A scheduler makes its own keys again. Rates that the loop sets are said to be lost.
    """
    if bucket.optimizer is None or bucket.first is None:
        return
    for scheduled, say in ((True, refuse_changed), (bucket.scheduler is not None, warn_of_rates)):
        now = settings(bucket.optimizer, scheduled)
        for group, then in zip(now, bucket.first, strict=True):
            changed = [key for key, value in group.items() if then.get(key, value) != value]
            new = bucket.scheduler is None and group.keys() - then.keys()
            if changed or new:
                say(tuple(changed))


def refuse_changed(keys: tuple[str, ...]) -> None:
    raise refused(
        f"the optimizer's groups changed during training ({', '.join(keys) or 'new'})",
        "keep what changes in the optimizer's state, and set rates with lr_scheduler",
    )


@lru_cache  # said once
def warn_of_rates(keys: tuple[str, ...]) -> None:
    LOG.warning(
        "your loop has changed the optimizer's %s, which a checkpoint does not hold: after resume "
        "or retarget, set it again before the first step, or give lr_scheduler",
        ", ".join(keys),
    )
