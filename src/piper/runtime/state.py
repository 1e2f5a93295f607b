"""What outlives a step on one device: parameters, their optimizers, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piper.errors import InputError, Problem
from piper.plan.instructions import State

MakeOptimizer = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


@dataclass(slots=True)
class BucketState:
    """One bucket on one device: named tensors, and the optimizer where the bucket is at home."""

    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    optimizer: torch.optim.Optimizer | None
    trained: bool = True

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Plain tensors on the same memory: kernels must not see autograd."""
        return tuple(parameter.data for parameter in self.parameters)


@dataclass
class DeviceState:
    """All buckets of one device, by the name of their value in plans."""

    buckets: dict[str, BucketState] = field(default_factory=dict)

    def add(
        self,
        states: Iterable[State],
        contents: Mapping[str, Sequence[str]],
        trainable: Callable[[str], bool],
        initial: Callable[[str], torch.Tensor],
        make_optimizer: MakeOptimizer,
    ) -> None:
        """Make what a plan needs and is not there yet; `contents` are the buckets' parameters."""
        for state in states:
            names = tuple(contents[state.bucket])
            self.refuse_other_bucket(state.value, names, trainable(state.bucket))
            if state.value not in self.buckets:
                trained = trainable(state.bucket)
                self.buckets[state.value] = make_bucket(
                    names, trained, initial, make_optimizer if state.home and trained else None
                )

    def refuse_other_bucket(self, value: str, names: tuple[str, ...], trained: bool) -> None:
        """Another program may read the same buckets, not the same parameters in other ones."""
        known = self.buckets.get(value)
        same = known and known.names == names and (known.trained == trained)
        taken = {name for other in self.buckets.values() for name in other.names} & set(names)
        if not same and (known or taken):
            raise InputError(
                "batch",
                Problem(
                    f"batches of this shape use {', '.join(sorted(names))[:80]} in another way "
                    "than the batches before",
                    "use a Trainer for one way of using parameters; give numbers that choose "
                    "between them the same value in every batch",
                ),
            )

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer here, by name; a copy and its home are the same name."""
        return {
            name: tensor
            for bucket in self.buckets.values()
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True)
        }

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {v: b.optimizer for v, b in self.buckets.items() if b.optimizer is not None}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of every parameter at home here, by parameter name."""
        found: dict[str, dict[str, Any]] = {}
        for bucket in self.buckets.values():
            if bucket.optimizer is not None:
                for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                    found[name] = dict(bucket.optimizer.state.get(parameter, {}))
        return found


def make_bucket(
    names: tuple[str, ...],
    trained: bool,
    initial: Callable[[str], torch.Tensor],
    make_optimizer: MakeOptimizer | None,
) -> BucketState:
    parameters = tuple(torch.nn.Parameter(initial(name), requires_grad=trained) for name in names)
    named = list(zip(names, parameters, strict=True))
    optimizer = make_optimizer(named) if make_optimizer and named else None
    return BucketState(names, parameters, optimizer, trained)
