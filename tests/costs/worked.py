"""Models whose regions have made-up work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from synthetic import chain

from piper.ir.model import Bucket, Model, Parameter
from piper.ir.values import TensorSpec
from piper.names import BI, BW, B, F, Phase

TIMES = {F: 1.0, B: 2.0, BI: 1.0, BW: 1.0}


@dataclass(frozen=True)
class Sketch:
    """A region to be: its code, FLOPs and operators of its forward, width of its parameters."""

    code: str
    flops: float
    operators: int = 3
    width: int = 4


def model_of(sketches: Sequence[Sketch]) -> Model:
    """A chain of such regions; other phases have the same work, whole backwards twice as much."""
    model = chain(len(sketches))
    regions = tuple(
        replace(
            region,
            code=one.code,
            flops={phase: times * one.flops for phase, times in TIMES.items()},
            traffic={phase: times * one.flops / 10 for phase, times in TIMES.items()},
            operators={phase: int(times * one.operators) for phase, times in TIMES.items()},
        )
        for region, one in zip(model.regions, sketches, strict=True)
    )
    buckets = {
        region.id: Bucket(
            region.buckets[0], (Parameter(region.id, TensorSpec((one.width, one.width))),)
        )
        for region, one in zip(regions, sketches, strict=True)
    }
    return replace(model, regions=regions, buckets=buckets)


def all_phases(model: Model) -> list[tuple[str, Phase]]:
    return [(region.code, phase) for region in model.regions for phase in Phase]
