"""How weights or tokens are divided: where parameters are cut, and which messages remain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from piper.ir.model import Model, Region
from piper.ir.placements import (
    Constant,
    Conversion,
    Cut,
    Invariant,
    Partial,
    Placement,
    Replicated,
    sent,
)


def division(model: Model) -> str:
    """Empty if no region is divided."""
    if all(region.ways == 1 for region in model.regions):
        return ""
    return "\n".join([*_parameters(model), *_messages(model)])


def _parameters(model: Model) -> Iterator[str]:
    """One line for parameters whose names differ only in numbers."""
    found: Counter[tuple[str, str]] = Counter()
    divided = {b for region in model.regions if region.ways > 1 for b in region.buckets}
    for bucket in (model.buckets[one] for one in model.buckets if one in divided):
        if not bucket.buffers:
            found.update((placed(p.placement), _pattern(p.name)) for p in bucket.parameters)
    yield "parameters:"
    for kind, name in found:
        yield f"  {kind:<24}{name}{_times(found[kind, name])}"


def _messages(model: Model) -> Iterator[str]:
    found: Counter[tuple[str, str]] = Counter()
    total = 0.0
    for region in model.regions:
        if region.conversion is not None:
            volume = _sent(model, region, region.conversion)
            total += volume
            found[_steps(region), f"{_size(volume)}  {region.source}"] += 1
    yield f"messages of one microbatch, {_size(total).strip()} sent by each device:"
    for steps, rest in found:
        yield f"  {steps:<32}{rest}{_times(found[steps, rest])}"


def _steps(region: Region) -> str:
    assert region.conversion is not None
    backward = region.conversion.backward if region.has_backward else "nothing"
    return f"F {region.conversion.forward}, B {backward}"


def _sent(model: Model, region: Region, conversion: Conversion) -> float:
    """Bytes that a device sends in both directions."""
    whole = max(model.values[name].nbytes for name in (*region.inputs, *region.outputs))
    if isinstance(conversion.source, Cut) and isinstance(conversion.target, Cut):
        whole *= region.ways  # both sides are pieces
    steps = [conversion.forward, *([conversion.backward] if region.has_backward else [])]
    return sum(sent(step, whole, region.ways) for step in steps)


def placed(placement: Placement) -> str:
    match placement:
        case Cut(dim, 1):
            return f"cut along {dim}"
        case Cut(dim, blocks):
            return f"cut along {dim}, {blocks} blocks"
        case Replicated():
            return "whole, gradients summed"
        case Invariant() | Constant():
            return "whole"
        case Partial():
            return "parts of a sum"
        case _:
            assert_never(placement)


def _pattern(name: str) -> str:
    """
    >>> _pattern("layers.3.up.weight")
    'layers.*.up.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _times(count: int) -> str:
    return f"  x{count}" if count > 1 else ""


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:9.3f} MB"
