"""What flows along data edges: tensors and bundles of tensors, by shape and dtype."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from piper.names import BucketId, RegionId, ValueId

ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4,
}  # fmt: skip
FLOATING = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor. A None in the shape is a size that depends on data."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return 0 if None in self.shape else prod(self.shape)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def in_type(self, dtype: str | None) -> "TensorSpec":
        """The same in another floating-point type. None, or another kind of number: unchanged."""
        if dtype is None or dtype == self.dtype or self.dtype not in FLOATING:
            return self
        return TensorSpec(self.shape, dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if s is None else str(s) for s in self.shape)}]"


class Role(StrEnum):
    """The purpose of a value in the step.

    Parameters, and what is loaded for each microbatch, exist before any node runs.
    """

    ACTIVATION = "activation"  # goes from region to region
    BATCH = "batch"  # one input of the step, cut to its microbatch
    SEED = "seed"  # the gradient of the loss with respect to itself: the microbatch's weight
    RANDOM = "random"  # the counter that random numbers of this microbatch start from
    RANK = "rank"  # the position of the device among those that divide a region
    CONTROL = "control"  # a number that says nothing: what counts is that it has arrived
    WEIGHTS = "weights"  # the parameters of a bucket, at its home or as a copy
    NEW_WEIGHTS = "new weights"  # the same after the update, in the same memory
    WHOLE_WEIGHTS = "whole weights"  # gathered from the shards of all replicas
    OPTIMIZER = "optimizer"  # state of the optimizer of a bucket, if it is copied in a step
    NEW_OPTIMIZER = "new optimizer"  # the same after the update, in the same memory
    SAVED = "saved"  # kept from F to B
    CARRY = "carry"  # kept from BI to BW
    GRADIENT = "gradient"  # of an activation: the contribution of one region
    WEIGHT_GRADIENT = "weight gradient"  # of a bucket: the contribution of one region
    GRADIENT_SHARD = "gradient shard"  # of a bucket, added up over replicas
    GRADIENT_SUM = "gradient sum"  # of a bucket, added up over replicas, on all of them
    ROUTE = "route"  # how many tokens go to which expert's device
    TOTALS = "totals"  # loss and squared gradient norm of the whole step


LOADED = (Role.BATCH, Role.SEED, Role.RANDOM, Role.RANK, Role.CONTROL)
SIZED = (Role.BATCH, Role.RANDOM)  # depends on where in the batch the rows of a microbatch are
GIVEN = (*LOADED, Role.WEIGHTS, Role.OPTIMIZER)
PER_DEVICE = (  # one for all replicas on a device; of all else, each replica has its own
    Role.WEIGHTS, Role.NEW_WEIGHTS, Role.WHOLE_WEIGHTS, Role.GRADIENT_SHARD, Role.GRADIENT_SUM,
    Role.TOTALS, Role.OPTIMIZER, Role.NEW_OPTIMIZER,
)  # fmt: skip
OF_THE_STEP = (Role.WEIGHTS, Role.NEW_WEIGHTS, Role.TOTALS)  # shared by all microbatches


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor, or a bundle of tensors with one lifetime (parameters, saved activations)."""

    specs: tuple[TensorSpec, ...]
    role: Role = Role.ACTIVATION
    index: int = 0  # BATCH only: which input
    part: int = 0  # BATCH, SEED, RANDOM: which microbatch, of `parts`
    parts: int = 1
    sizes: tuple[int, ...] = ()  # BATCH, RANDOM: rows of each microbatch, if they differ
    bundle: bool = False  # a tuple of tensors, even if there is one or none
    bucket: BucketId | None = None  # whose parameters or gradients these are
    copy: bool = False  # WEIGHTS and NEW_WEIGHTS: a copy away from home, kept equal
    state: ValueId | None = None  # NEW_WEIGHTS, NEW_OPTIMIZER: what they replace
    base: ValueId | None = None  # which value of the model it is, or is the gradient of
    region: RegionId | None = None  # which region keeps it, or contributes this gradient
    host: bool = False  # it is in the memory of the host, not of the device
    experts: RegionId | None = None  # it is on the devices of this region's experts, not at home

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def is_given(self) -> bool:
        """Whether it exists before any node runs."""
        return self.role in GIVEN

    @property
    def optimizer(self) -> str:
        """The bucket whose optimizer state it is. Empty: it is something else."""
        return self.bucket or "" if self.role in (Role.OPTIMIZER, Role.NEW_OPTIMIZER) else ""

    @property
    def copy_of(self) -> BucketId | None:
        """The bucket of which these are the parameters, away from its home."""
        return self.bucket if self.role is Role.WEIGHTS and self.copy else None

    def within(self, replica: int, replicas: int) -> "Value":
        """The same value for one of several replicas that are given one batch."""
        part, parts = replica * self.parts + self.part, replicas * self.parts
        return replace(self, part=part, parts=parts)

    def of(self, part: int, parts: int, sizes: tuple[int, ...] = ()) -> "Value":
        """The same value for one microbatch; the same object if microbatches do not differ."""
        if self.role not in LOADED:
            return self
        return replace(self, part=part, parts=parts, sizes=sizes if self.role in SIZED else ())
