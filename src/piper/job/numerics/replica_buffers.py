"""Buffers of a model that is trained plainly: a copy for each replica, as processes would have."""

from __future__ import annotations

import torch

from piper.capture.torch_private import own_buffers

Buffers = dict[str, torch.Tensor | None]


class ReplicaBuffers:
    """Puts the buffers of a replica into a model, before one of its microbatches."""

    def __init__(self, model: torch.nn.Module, microbatches: int) -> None:
        self.held = [own_buffers(module) for module in model.modules()]
        self.microbatches = microbatches  # of each replica
        self.kept = {0: self.held_now()}
        self.initial = [copied(one) for one in self.held]
        self.replica = 0

    def held_now(self) -> list[Buffers]:
        return [dict(one) for one in self.held]

    def use(self, microbatch: int) -> None:
        """Those of the replica that has this one of all microbatches."""
        replica = microbatch // self.microbatches
        if replica != self.replica:
            self.kept[self.replica] = self.held_now()
            found = self.kept.setdefault(replica, [copied(one) for one in self.initial])
            for held, one in zip(self.held, found, strict=True):
                held.update(one)
            self.replica = replica


def copied(buffers: Buffers) -> Buffers:
    return {name: None if one is None else one.clone() for name, one in buffers.items()}
