"""Messages in flight, and what `wait` returns for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from piper.runtime.comm.gloo import Handle, Shard


@dataclass(slots=True)
class Single:
    """One tensor in flight, without a bundle around it."""

    arrival: Any

    def wait(self) -> torch.Tensor:
        (tensor,) = self.arrival.wait()
        return tensor


@dataclass(slots=True)
class Arrived:
    """Works that fill tensors in place."""

    works: list[Handle]
    tensors: tuple[torch.Tensor, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class Shards:
    """This device's shards of several messages."""

    coming: list[Shard]

    def wait(self) -> tuple[torch.Tensor, ...]:
        return tuple(shard.wait() for shard in self.coming)
