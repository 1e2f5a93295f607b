"""A captured model: its regions, the values between them, its parameters.

Pure data: tests and benchmarks build models of any size without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from piper.ir.placement.placements import Conversion, Cut, Invariant, Placement, local_shape
from piper.ir.remat_policy import Recomputation, RematPolicy
from piper.ir.values import TensorSpec, Value
from piper.names import BucketId, Phase, RegionId, ValueId

Specs = tuple[TensorSpec, ...]
Moments = tuple[tuple[int, int], ...]  # bytes of all but experts, and of experts


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the model, by its (first) name in the module."""

    name: str
    spec: TensorSpec  # of the whole parameter, also where a device holds a piece of it
    placement: Placement = Invariant()  # on the devices that divide its regions
    by_tokens: Placement = Invariant()  # if these divide weights: on those that divide tokens, too

    def local(self, ways: int) -> TensorSpec:
        """What one of `ways` devices holds."""
        return replace(self.spec, shape=local_shape(self.spec.shape, self.placement, ways))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that the same regions use. They are stored and sent together.

    Regions compute with the types of `parameters`. The optimizer may have its own copy in a finer
    type, the masters, and gradients may be added up in another type.
    """

    id: BucketId
    parameters: tuple[Parameter, ...]
    trainable: bool = True
    buffers: bool = False  # not parameters: a forward may update them
    master: str | None = None  # dtype of the optimizer's parameters; None: the same
    gradient: str | None = None  # dtype in which gradients are added and sent; None: the same

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(parameter.spec for parameter in self.parameters)

    def gradients(self, held: Specs) -> Specs:
        """The gradients of what is held of this bucket: parameters, experts, or shards."""
        return held if self.gradient is None else tuple(s.in_type(self.gradient) for s in held)

    def updated(self, held: Specs) -> Specs:
        """What the optimizer updates of what is held: masters, or the parameters themselves."""
        return held if self.master is None else tuple(s.in_type(self.master) for s in held)

    def masters(self, held: Specs) -> Specs:
        """The masters of what is held. A tensor that has the master's type has no copy."""
        pairs = zip(held, self.updated(held), strict=True)
        return tuple(master for spec, master in pairs if master != spec)

    @property
    def placement(self) -> type[Placement]:
        """The kind of placement that all its parameters have."""
        return type(self.parameters[0].placement) if self.parameters else Invariant

    def along(self, axes: int) -> tuple[type[Placement], ...]:
        """The kinds of placements along the axes of a division."""
        tokens = type(self.parameters[0].by_tokens) if self.parameters else Invariant
        return (tokens, self.placement)[-axes:]

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Dimension and blocks of each parameter, if these are cut."""
        found = (parameter.placement for parameter in self.parameters)
        return tuple((one.dim, one.blocks) for one in found if isinstance(one, Cut))


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A maximal run of equal tags, and what its graphs read and write.

    Indices point into `inputs`, `outputs` and `buckets`. What BW reads beyond these is in the
    carry, written by BI.
    """

    id: RegionId
    tags: tuple[tuple[str, int], ...]
    run: int = 0  # which of the runs of equal tags it is, in program order
    code: str  # regions with equal code share one compiled graph
    source: str = ""  # the line of the user's model where it begins
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    buckets: tuple[BucketId, ...] = ()
    input_grads: tuple[int, ...] = ()  # inputs that get a gradient
    output_grads: tuple[int, ...] = ()  # outputs whose gradient the backward reads
    backward_inputs: tuple[int, ...] = ()  # inputs the backward reads again
    backward_buckets: tuple[int, ...] = ()
    saved: tuple[TensorSpec, ...] = ()  # kept from F to B
    weight_inputs: tuple[int, ...] = ()  # of backward_inputs, those BW reads
    weight_output_grads: tuple[int, ...] = ()  # of output_grads, those BW reads
    weight_buckets: tuple[int, ...] = ()  # of backward_buckets, those BW reads
    carry: tuple[TensorSpec, ...] = ()  # kept from BI to BW
    stateful: bool = False  # F updates buffers: its microbatches keep their order
    reads_state: tuple[str, ...] = ()  # those of these buffers that its results depend on
    varying_state: tuple[str, ...] = ()  # of those, the ones that become different in replicas
    has_backward: bool = True
    flops: Mapping[Phase, float] = field(default_factory=dict)
    workspace: Mapping[Phase, int] = field(default_factory=dict)  # bytes, while it runs
    traffic: Mapping[Phase, float] = field(default_factory=dict)  # bytes, without arithmetic
    operators: Mapping[Phase, int] = field(default_factory=dict)  # that are started one by one
    fused: Mapping[Phase, tuple[float, int]] = field(default_factory=dict)  # both, if compiled
    fused_workspace: Mapping[Phase, int] = field(default_factory=dict)  # the same
    # If it looks like a region of experts: when it may be highest, whatever share a device holds.
    expert_workspace: Mapping[Phase, Moments] = field(default_factory=dict)
    fused_expert_workspace: Mapping[Phase, Moments] = field(default_factory=dict)
    recomputes: Recomputation | None = None  # the backward recomputes the forward
    # What it becomes under `Remat`, by what that keeps: capture makes those that a strategy names.
    recomputed: Mapping[RematPolicy, "Region"] = field(default_factory=dict)
    # Over how many devices it is divided, along each axis; each runs these graphs on its part.
    axes: tuple[int, ...] = ()
    conversion: Conversion | None = None  # its passes are messages between devices
    axis: int = 0  # along which they are
    rows: int | None = None  # of the microbatches that it is for, where these differ in size
    size: int | None = None  # the name of that size; not the rows if replicas have different ones
    twin: RegionId | None = None  # the same for the microbatches of the first size, if it is not

    @property
    def ways(self) -> int:
        return prod(self.axes)

    def allocates(self, phase: Phase, shares: int = 1, compiled: bool = False) -> int:
        """Bytes while it runs with one of so many shares of its experts."""
        whole = self.fused_workspace if compiled else self.workspace
        parts = self.fused_expert_workspace if compiled else self.expert_workspace
        if shares == 1 or phase not in parts:
            return whole.get(phase, 0)
        return max((rest + experts // shares for rest, experts in parts[phase]), default=0)

    def named(self, **fields: Any) -> "Region":
        """With other tags, rows or sizes, and so the descriptions of it that recompute."""
        others = {keep: replace(one, **fields) for keep, one in self.recomputed.items()}
        return replace(self, **fields, recomputed=others)


@dataclass(frozen=True, kw_only=True)
class Model:
    """All regions in program order, the values between them, and all parameters."""

    regions: tuple[Region, ...]
    values: Mapping[ValueId, Value]
    buckets: Mapping[BucketId, Bucket]
    loss: ValueId
    # The same for microbatches of other sizes, by their rows. `Split` makes regions of them.
    others: Mapping[int, "Model"] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()  # rows of each microbatch, if they differ; from `Split` on
    # The name of each of these sizes, if other replicas have other rows: the same in all replicas.
    size_names: tuple[int, ...] = ()

    def microbatches(self, region: Region, n: int) -> Sequence[int]:
        """Those of n that pass through a region."""
        if region.size is None:
            return range(n)
        return [k for k, size in enumerate(self.named_sizes) if size == region.size]

    @property
    def named_sizes(self) -> tuple[int, ...]:
        """The name of the size of each microbatch: its rows, or what stands for them."""
        return self.size_names or self.sizes

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What rules have worked out about its graphs, whatever their tags, once for all DAGs."""
        return {}

    def retagged(self, regions: tuple[Region, ...]) -> "Model":
        """The same model, its regions under other tags."""
        found = replace(self, regions=regions)
        found.__dict__["derived"] = self.derived
        return found

    @cached_property
    def by_id(self) -> dict[RegionId, Region]:
        return {region.id: region for region in self.regions}

    @cached_property
    def first_uses(self) -> dict[BucketId, RegionId]:
        """The first region that uses a bucket. The devices of that region are its home."""
        found: dict[BucketId, RegionId] = {}
        for region in self.regions:
            for bucket in region.buckets:
                found.setdefault(bucket, region.id)
        return found

    @cached_property
    def contributors(self) -> dict[ValueId, tuple[RegionId, ...]]:
        """The regions that contribute to the gradient of a value; the last use comes first."""
        found: dict[ValueId, tuple[RegionId, ...]] = {}
        for region in reversed(self.regions):
            for value in (region.inputs[k] for k in region.input_grads):
                found[value] = (*found.get(value, ()), region.id)
        return found

    @cached_property
    def conversions(self) -> dict[ValueId, Region]:
        """The conversion that writes a value."""
        return {region.outputs[0]: region for region in self.regions if region.conversion}

    def held(self, bucket: BucketId) -> tuple[TensorSpec, ...]:
        """What a device holds of a bucket before any sharding: its pieces, where regions are
        divided."""
        found = self.buckets[bucket]
        user = self.first_uses.get(bucket)
        axes = self.by_id[user].axes if user else ()
        if not axes or found.placement is not Cut:
            return found.specs
        return tuple(parameter.local(axes[-1]) for parameter in found.parameters)

    def trained(self, region: Region) -> tuple[BucketId, ...]:
        """The buckets that get gradients from the region's backward."""
        if not region.has_backward:
            return ()
        return tuple(bucket for bucket in region.buckets if self.buckets[bucket].trainable)
