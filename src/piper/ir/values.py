"""What flows along data edges: tensors and bundles of tensors, known by shape and type."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor. A None in the shape is a size that depends on data."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return prod(size or 0 for size in self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if s is None else str(s) for s in self.shape)}]"


class Origin(StrEnum):
    """Where a value comes from."""

    FLOW = "flow"  # written by a node
    BATCH = "batch"  # one input of the step, cut to its microbatch
    WEIGHTS = "weights"  # a bucket's parameters, there before the step
    SEED = "seed"  # the gradient of the loss with respect to itself: the microbatch's weight
    RANDOM = "random"  # the counter that random numbers of this microbatch start from


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor, or a bundle that lives and dies together (parameters, saved activations)."""

    specs: tuple[TensorSpec, ...]
    origin: Origin = Origin.FLOW
    index: int = 0  # BATCH only: which input
    part: int = 0  # BATCH, SEED, RANDOM: which microbatch, of `parts`
    parts: int = 1
    bundle: bool = False  # a tuple of tensors, even if there is one or none

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def of(self, part: int, parts: int) -> "Value":
        """The same value for one microbatch; shared where the microbatch makes no difference."""
        if self.origin in (Origin.BATCH, Origin.SEED, Origin.RANDOM):
            return replace(self, part=part, parts=parts)
        return self
