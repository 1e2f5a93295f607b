"""Divided models without torch: pieces of regions, and the conversions between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from piper.ir.model import Bucket, Model, Parameter, Region
from piper.ir.placement.placements import (
    Conversion,
    Cut,
    Invariant,
    Partial,
    Placement,
    Replicated,
    Shifted,
    local_shape,
)
from piper.ir.values import Role, TensorSpec, Value
from piper.names import BI, BW, B, BucketId, F, RegionId, ValueId

WHOLE = (8, 4)
I, R, P, S, T = Invariant(), Replicated(), Partial(), Cut(0), Cut(1)
TENSOR_PARALLEL = ((I, R), (P, I))  # Megatron's f and g
SEQUENCE_PARALLEL = ((S, R), (P, S))
ULYSSES = ((S, T), (T, S))
RING = ((S, Shifted(S, 1)), (Shifted(S, 1), Shifted(S, 2)))
OTHERS = ((I, S), (S, I), (P, R))
KINDS = {
    "tp": TENSOR_PARALLEL,
    "sp": SEQUENCE_PARALLEL,
    "cp": ULYSSES,
    "ring": RING,
    "others": OTHERS,
}
Steps = Sequence[tuple[Placement, Placement]]


def divided_chain(
    stages: int = 1, ways: int = 2, steps: Steps = TENSOR_PARALLEL, both: bool = False
) -> Model:
    """In every stage a piece, then for each step a conversion and another piece.

    A piece also reads what the piece before it has written, where that is placed alike. `both`:
    tokens and weights are divided, over `ways` devices each; conversions are along each in turn.
    """
    sketch = DividedChain(ways, steps, both)
    for stage in range(stages):
        sketch.stage(stage, last=stage == stages - 1)
    return Model(
        regions=tuple(sketch.regions), values=sketch.values, buckets=sketch.buckets,
        loss=ValueId("loss"),
    )  # fmt: skip


@dataclass
class DividedChain:
    """The model so far."""

    ways: int
    steps: Steps
    both: bool = False
    regions: list[Region] = field(default_factory=list)
    values: dict[ValueId, Value] = field(default_factory=dict)
    buckets: dict[BucketId, Bucket] = field(default_factory=dict)
    came: list[ValueId] = field(default_factory=list)  # what the next piece reads
    runs: int = 0

    def stage(self, stage: int, last: bool) -> None:
        self.runs = 0
        for number, (source, target) in enumerate(self.steps):
            made = self.piece(stage, number, source)
            read = self.convert(stage, made, source, target)
            self.came = [read, made] if (source, target) == (I, S) else [read]
        end = self.piece(stage, len(self.steps), self.steps[-1][1], last)
        self.came = [end]

    def piece(self, stage: int, number: int, placement: Placement, last: bool = False) -> ValueId:
        name = RegionId(f"PP{stage}.{number}")
        acts = list(self.came) or [self.value("x", I, Role.BATCH)]
        grads = tuple(range(len(self.came)))
        rank = [self.value("rank", None, Role.RANK)] if number == 1 else []
        out = ValueId("loss") if last else ValueId(f"h{stage}.{number}")
        self.values[out] = Value((TensorSpec(()) if last else self.local(placement),))
        tokens = (Replicated(), Invariant()) if self.both else (Invariant(),)
        kinds = product(tokens, (Cut(1), Replicated(), Invariant()))
        buckets = [self.bucket(name, *kind) for kind in kinds]
        inputs = (*acts, *rank)
        self.regions.append(
            Region(
                id=name, tags=(("PP", stage),), run=self.run(), code="piece", axes=self.axes,
                inputs=inputs, outputs=(out,), buckets=tuple(buckets), input_grads=grads,
                output_grads=(0,), backward_inputs=tuple(range(len(inputs))),
                backward_buckets=tuple(range(len(buckets))),
                saved=(self.local(placement),), weight_inputs=(0,), weight_output_grads=(0,),
                carry=(self.local(placement),),
                flops={F: 1e9, B: 2e9, BI: 1e9, BW: 1e9},
            )
        )  # fmt: skip
        return out

    def convert(self, stage: int, value: ValueId, source: Placement, target: Placement) -> ValueId:
        out = ValueId(f"{value}~")
        self.values[out] = Value((self.local(target),))
        self.regions.append(
            Region(
                id=RegionId(f"{value}:convert"), tags=(("PP", stage),), run=self.run(),
                code="convert", axes=self.axes, inputs=(value,), outputs=(out,),
                input_grads=(0,), output_grads=(0,), conversion=Conversion(source, target),
                axis=self.runs // 2 % len(self.axes),
            )
        )  # fmt: skip
        return out

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.ways,) * (1 + self.both) if self.ways > 1 else ()

    def run(self) -> int:
        self.runs += 1
        return self.runs - 1

    def value(self, name: str, placement: Placement | None, role: Role) -> ValueId:
        spec = TensorSpec((), "int64") if placement is None else self.local(placement)
        self.values[ValueId(name)] = Value((spec,), role)
        return ValueId(name)

    def local(self, placement: Placement) -> TensorSpec:
        return TensorSpec(local_shape(WHOLE, placement, self.ways))

    def bucket(self, region: RegionId, tokens: Placement, placement: Placement) -> BucketId:
        kind = f"{type(tokens).__name__.lower()}-" if self.both else ""
        name = BucketId(f"{region}.{kind}{type(placement).__name__.lower()}")
        parameter = Parameter(f"{name}.weight", TensorSpec((4, 4)), placement, tokens)
        self.buckets[name] = Bucket(name, (parameter,))
        return name
