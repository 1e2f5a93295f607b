"""Runs captured regions one after the other in one process: the smallest possible runtime."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor, nn

from piper.capture import Captured
from piper.capture.kernels.callables import Kernel, Kernels
from piper.ir.model import Region
from piper.ir.remat_policy import RematPolicy
from piper.ir.values import Role, TensorSpec
from piper.names import BI, BW, B, BucketId, F, Phase, RegionId, ValueId


def kernel(captured: Captured, region: str, phase: Phase, ways: int = 1) -> Kernel:
    """What computes this phase of the region."""
    return captured.kernels.get(
        captured.code(captured.model.by_id[RegionId(region)], ways), phase, False
    )


@dataclass
class Interpreter:
    """One step on one microbatch; what it leaves behind is the loss and the gradients by name."""

    captured: Captured
    weights: dict[str, Tensor]
    split: bool = False  # BI, and BW after everything else, instead of B
    policy: RematPolicy | None = None  # every region as under `Remat`
    compiled: bool = False
    random: tuple[int, int, int] = (0, 0, 1)
    received: Kernels = field(default_factory=Kernels)
    values: dict[ValueId, Tensor] = field(default_factory=dict)
    kept: dict[RegionId, tuple[Tensor, ...]] = field(default_factory=dict)
    value_grads: dict[ValueId, Tensor] = field(default_factory=dict)
    bucket_grads: dict[BucketId, tuple[Tensor, ...]] = field(default_factory=dict)

    def load(self, batch: tuple) -> None:
        """What is there before any region runs."""
        tensors = self.captured.inputs.flatten(batch)
        for name, value in self.captured.model.values.items():
            if value.role is Role.BATCH:
                self.values[name] = tensors[value.index].contiguous()
            if value.role is Role.RANDOM:
                self.values[name] = torch.tensor(self.random, device=self.captured.device)

    def seed(self) -> None:
        """The gradient of the loss with respect to itself."""
        model = self.captured.model
        dtype = getattr(torch, model.values[model.loss].specs[0].dtype)
        self.value_grads[model.loss] = torch.ones((), device=self.captured.device, dtype=dtype)

    def step(self, batch: tuple) -> tuple[Tensor, dict[str, Tensor]]:
        policies = [] if self.policy is None else [self.policy]
        model = self.captured.model_with(policies)
        self.load(batch)
        with torch.no_grad():
            regions = [r.recomputed.get(self.policy, r) for r in model.regions]
            for region in regions:
                self.forward(region)
            self.seed()
            backward = [region for region in reversed(regions) if region.has_backward]
            later = [(region, *self.backward(region)) for region in backward]
            for region, carry, tangents in later:
                if self.split:
                    self.weight_backward(region, carry, tangents)
        return self.values[model.loss], self.gradients()

    def forward(self, region: Region) -> None:
        reads = [self.bucket(bucket) for bucket in region.buckets]
        results = self.call(region, F, [*reads, *self.inputs(region, range(len(region.inputs)))])
        if region.has_backward:
            *results, self.kept[region.id] = results
            check(self.kept[region.id], region.saved)
        for name, tensor in zip(region.outputs, results, strict=True):
            check([tensor], self.captured.model.values[name].specs)
            self.values[name] = tensor

    def backward(self, region: Region) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
        tangents = {i: self.value_grads.pop(region.outputs[i]) for i in region.output_grads}
        reads = [
            *(self.bucket(region.buckets[i]) for i in region.backward_buckets),
            *self.inputs(region, region.backward_inputs),
            self.kept.pop(region.id),
            *tangents.values(),
        ]
        results = self.call(region, BI if self.split else B, reads)
        carry: tuple[Tensor, ...] = ()
        if self.split:
            *results, carry = results
            check(carry, region.carry)
        count = len(region.input_grads)
        check_owned([*results[:count], *flat(results[count:])], [*flat(reads), *carry])
        for i, gradient in zip(region.input_grads, results[:count], strict=True):
            add(self.value_grads, region.inputs[i], gradient)
        if not self.split:
            self.store(region, results[count:])
        return carry, tangents

    def weight_backward(
        self, region: Region, carry: tuple[Tensor, ...], tangents: dict[int, Tensor]
    ) -> None:
        reads = [
            *(self.bucket(region.buckets[i]) for i in region.weight_buckets),
            *self.inputs(region, region.weight_inputs),
            carry,
            *(tangents[i] for i in region.weight_output_grads),
        ]
        results = self.call(region, BW, reads)
        check_owned(flat(results), flat(reads))
        self.store(region, results)

    def store(self, region: Region, bundles: Iterable[tuple[Tensor, ...]]) -> None:
        for bucket, bundle in zip(self.trainable(region), bundles, strict=True):
            check(bundle, self.captured.model.buckets[bucket].specs)
            if bucket in self.bucket_grads:
                torch._foreach_add_(self.bucket_grads[bucket], bundle)
            else:
                self.bucket_grads[bucket] = bundle

    def trainable(self, region: Region) -> list[BucketId]:
        return [name for name in region.buckets if self.captured.model.buckets[name].trainable]

    def call(self, region: Region, phase: Phase, reads: list) -> tuple:
        """As a process does that captured nothing: what it runs was text on the way."""
        code = self.captured.code(region)
        key = code.graph, phase, self.compiled
        if key not in self.received.made:
            self.received.add(*key, self.captured.kernels.to_json(*key))
        return self.received.get(code, phase, self.compiled)(*reads)

    def inputs(self, region: Region, positions: Iterable[int]) -> list[Tensor]:
        return [self.values[region.inputs[i]] for i in positions]

    def bucket(self, name: BucketId) -> tuple[Tensor, ...]:
        parameters = self.captured.model.buckets[name].parameters
        return tuple(self.weights[parameter.name] for parameter in parameters)

    def gradients(self) -> dict[str, Tensor]:
        return {
            parameter.name: gradient
            for bucket, bundle in self.bucket_grads.items()
            for parameter, gradient in zip(
                self.captured.model.buckets[bucket].parameters, bundle, strict=True
            )
        }


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def eager(model: nn.Module, loss_fn, batch: tuple) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain PyTorch: loss and gradients by name, of the parameters that get one."""
    model.zero_grad(set_to_none=True)
    loss = model(*batch) if loss_fn is None else loss_fn(model(*batch[:-1]), batch[-1])
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]],
    expected: tuple[Tensor, dict[str, Tensor]],
    exact: bool = True,
) -> None:
    """Losses and gradients that are equal bit by bit, unless not `exact`."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[0], expected[0].to(found[0].dtype), **tolerance)
    torch.testing.assert_close(found[1], expected[1], **tolerance)


def assert_parity(
    captured: Captured,
    model: nn.Module,
    loss_fn,
    batch: tuple,
    exact: bool = True,
    policies: Iterable[RematPolicy] = ((),),
    **options,
) -> None:
    """B, and BI with BW, give what autograd gives, also if they recompute the forward; buffers end
    up the same."""
    before = state(model)
    expected = eager(model, loss_fn, batch)
    after = state(model)
    for split, policy in product((False, True), (None, *policies)):
        weights = {name: tensor.clone() for name, tensor in before.items()}
        run = Interpreter(captured, weights, split=split, policy=policy, **options)
        found = run.step(batch)
        assert_same(found, expected, exact)
        for name, tensor in after.items():
            assert torch.equal(weights[name], tensor), name


def assert_close(captured: Captured, model: nn.Module, batch: tuple) -> None:
    """Where the order of sums may differ: a model in float64 that returns its loss."""
    expected, tolerance = eager(model, None, batch), {"rtol": 1e-10, "atol": 1e-13}
    for split in (False, True):
        found = Interpreter(captured, state(model), split=split).step(batch)
        torch.testing.assert_close(found[0], expected[0], **tolerance)
        torch.testing.assert_close(found[1], expected[1], **tolerance)


def check(tensors: Iterable[Tensor], specs: Iterable[TensorSpec]) -> None:
    for tensor, spec in zip(tensors, specs, strict=True):
        assert str(tensor.dtype) == f"torch.{spec.dtype}"
        assert len(tensor.shape) == len(spec.shape)
        assert all(b in (a, None) for a, b in zip(tensor.shape, spec.shape, strict=True))


def check_owned(gradients: list[Tensor], others: Iterable[Tensor]) -> None:
    """Gradients are contiguous and share memory with nothing: the runtime adds to them."""
    taken = {memory(tensor) for tensor in others if tensor.numel()}
    for gradient in gradients:
        assert gradient.is_contiguous()
        if gradient.numel():
            assert memory(gradient) not in taken
            taken.add(memory(gradient))


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def add(grads: dict[ValueId, Tensor], name: ValueId, gradient: Tensor) -> None:
    if name in grads:
        grads[name].add_(gradient)
    else:
        grads[name] = gradient


def flat(bundles: Iterable) -> list[Tensor]:
    return [t for b in bundles for t in (b if isinstance(b, tuple) else (b,))]
