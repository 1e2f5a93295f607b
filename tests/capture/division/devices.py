"""Runs a divided model on several devices in one process, region by region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from capture.division.trials import joined, piece
from capture.interpreter import Interpreter, add, check, state
from torch import Tensor, nn

from piper.capture import Captured
from piper.capture.kernels.callables import Kernels
from piper.ir.model import Region
from piper.ir.naming import RANK
from piper.ir.placement.placements import Cut, Invariant, Partial, Replicated, Step
from piper.names import BucketId


class Device(Interpreter):
    """One device: what it holds of each parameter, and its rank."""

    def store(self, region: Region, bundles) -> None:
        model = self.captured.model
        for bucket, bundle in zip(self.trainable(region), bundles, strict=True):
            check(bundle, model.held(bucket))
            if bucket in self.bucket_grads:
                torch._foreach_add_(self.bucket_grads[bucket], bundle)
            else:
                self.bucket_grads[bucket] = bundle


@dataclass
class Devices:
    """`ways` devices, which run each region before any of them runs the next."""

    captured: Captured
    model: nn.Module
    ways: int
    options: dict = field(default_factory=dict)
    sent: Counter = field(default_factory=Counter)  # bytes that a device sends, by step

    def __post_init__(self) -> None:
        tensors = state(self.model)
        buckets = self.captured.model.buckets.values()
        self.placements = {p.name: p.placement for bucket in buckets for p in bucket.parameters}
        self.devices = []
        self.options.setdefault("received", Kernels())
        for rank in range(self.ways):
            weights = {
                name: piece(tensor, self.placements.get(name, Invariant()), self.ways, rank).clone()
                for name, tensor in tensors.items()
            }
            self.devices.append(Device(self.captured, weights, **self.options))
            self.devices[-1].values[RANK] = torch.tensor(rank)

    def step(self, batch: tuple) -> tuple[Tensor, dict[str, Tensor]]:
        model = self.captured.model
        for device in self.devices:
            device.load(batch)
        policy = self.devices[0].policy
        model = self.captured.model_with([] if policy is None else [policy])
        regions = [r.recomputed.get(policy, r) for r in model.regions]
        with torch.no_grad():
            for region in regions:
                self.forward(region)
            for device in self.devices:
                device.seed()
            later = [self.backward(r) for r in reversed(regions) if r.has_backward]
            for region, kept in (one for one in later if one is not None):
                for device, (carry, tangents) in zip(self.devices, kept, strict=True):
                    if device.split:
                        device.weight_backward(region, carry, tangents)
        losses = [device.values[model.loss] for device in self.devices]
        return joined(losses, Invariant()), self.gradients()

    def forward(self, region: Region) -> None:
        if region.conversion is None:
            for device in self.devices:
                device.forward(region)
            return
        (source,), (target,) = region.inputs, region.outputs
        given = [device.values[source] for device in self.devices]
        for device, tensor in zip(
            self.devices, self.convert(region.conversion.forward, given), strict=True
        ):
            check([tensor], self.captured.model.values[target].specs)
            device.values[target] = tensor

    def backward(self, region: Region):
        if region.conversion is None:
            return region, [device.backward(region) for device in self.devices]
        (source,), (target,) = region.inputs, region.outputs
        assert region.input_grads == region.output_grads == (0,)
        given = [device.value_grads.pop(target) for device in self.devices]
        for device, tensor in zip(
            self.devices, self.convert(region.conversion.backward, given), strict=True
        ):
            add(device.value_grads, source, tensor.clone())
        return None

    def convert(self, step: Step, given: Sequence[Tensor]) -> list[Tensor]:
        """What every device has after a message, which joins or cuts along dimension 0."""
        for tensor in given:
            assert tensor.is_contiguous()
        ways, size = self.ways, given[0].nbytes
        match step:
            case Step.NOTHING:
                return list(given)
            case Step.ALL_REDUCE:
                self.sent[step] += 2 * size * (ways - 1) / ways
                return [sum(given[1:], given[0])] * ways
            case Step.ALL_GATHER:
                self.sent[step] += size * (ways - 1)
                return [torch.cat(list(given))] * ways
            case Step.REDUCE_SCATTER:
                self.sent[step] += size * (ways - 1) / ways
                return list(sum(given[1:], given[0]).chunk(ways))
            case Step.SLICE:
                return [tensor.chunk(ways)[rank] for rank, tensor in enumerate(given)]
            case Step.SHIFT | Step.SHIFT_BACK:
                self.sent[step] += size
                by = 1 if step is Step.SHIFT else -1
                return [given[(rank - by) % ways].clone() for rank in range(ways)]
            case Step.ALL_TO_ALL:
                self.sent[step] += size * (ways - 1) / ways
                cut = [tensor.chunk(ways) for tensor in given]
                return [torch.cat([one[rank] for one in cut]) for rank in range(ways)]

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for bucket in self.devices[0].bucket_grads:
            every = zip(*(device.bucket_grads[bucket] for device in self.devices), strict=True)
            parameters = self.captured.model.buckets[BucketId(bucket)].parameters
            for parameter, pieces in zip(parameters, every, strict=True):
                parts = isinstance(parameter.placement, Replicated)
                placement = Partial() if parts else parameter.placement
                assert isinstance(placement, Cut | Partial | Invariant)
                found[parameter.name] = joined(list(pieces), placement)
        return found
