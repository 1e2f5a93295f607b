"""How weights or tokens are divided: where parameters are cut, and which messages remain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from piper.ir.model import Model, Region
from piper.ir.placement.placements import (
    Constant,
    Conversion,
    Cut,
    Invariant,
    Partial,
    Placement,
    Replicated,
    Returned,
    Shifted,
    Step,
    sent,
)
from piper.view.reports.footprint import size_text


def division(model: Model) -> str:
    """Empty if no region is divided."""
    if all(region.ways == 1 for region in model.regions):
        return ""
    return "\n".join([*_parameters(model), *_messages(model), *_beside_megatron(model)])


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
    for region, conversion in _conversions(model):
        volume = _sent(model, region, conversion)
        total += volume
        found[_steps(region), f"{_size(volume)}  {region.source}"] += 1
    yield f"messages of one microbatch, {_size(total).strip()} sent by each device:"
    for steps, rest in found:
        yield f"  {steps:<32}{rest}{_times(found[steps, rest])}"


def _beside_megatron(model: Model) -> Iterator[str]:
    """What tensor parallelism sends, in the unit of Megatron's formula.

    An all-reduce of the hidden state sends as much as a reduce-scatter and an all-gather of it.
    """
    layers, found = _layers(model), list(_conversions(model))
    if not layers or not found:
        return
    hidden = Counter(_whole(model, *one) for one in found).most_common(1)[0][0]
    sizes = [_sent(model, *one) / sent(Step.ALL_REDUCE, hidden, _ways(one[0])) for one in found]
    yield (
        f"in all-reduces of {_size(hidden).strip()}: {sum(sizes):.2f}; "
        f"Megatron's: 4 a layer, 1 for the embedding, 1 for the head: {4 * layers + 2}"
    )


def _layers(model: Model) -> int:
    """How many layers have weights that are cut, by the numbers in their names."""
    cut: dict[str, set[str]] = {}
    for bucket in model.buckets.values():
        for parameter in bucket.parameters:
            if isinstance(parameter.placement, Cut) and len(parameter.spec.shape) > 1:
                cut.setdefault(_pattern(parameter.name), set()).add(parameter.name)
    return max((len(names) for pattern, names in cut.items() if names != {pattern}), default=0)


def _conversions(model: Model) -> Iterator[tuple[Region, Conversion]]:
    return ((r, r.conversion) for r in model.regions if r.conversion is not None)


def _steps(region: Region) -> str:
    assert region.conversion is not None
    backward = region.conversion.backward if region.has_backward else "nothing"
    return f"F {region.conversion.forward}, B {backward}"


def _sent(model: Model, region: Region, conversion: Conversion) -> float:
    """Bytes that a device sends in both directions."""
    whole = _whole(model, region, conversion)
    steps = [conversion.forward, *([conversion.backward] if region.has_backward else [])]
    return sum(sent(step, whole, _ways(region)) for step in steps)


def _whole(model: Model, region: Region, conversion: Conversion) -> int:
    """Bytes of the tensor that a conversion is about."""
    most = max(model.values[name].nbytes for name in (*region.inputs, *region.outputs))
    both = conversion.source, conversion.target
    pieces = all(isinstance(placement, Cut | Shifted | Returned) for placement in both)
    return most * _ways(region) if pieces else most


def _ways(region: Region) -> int:
    """How many devices a conversion is among."""
    return region.axes[region.axis]


def placed(placement: Placement) -> str:
    match placement:
        case Cut(dim, blocks, zigzag):
            some = f", {blocks} blocks" if blocks > 1 else ""
            return f"cut along {dim}{some}{', zigzag' if zigzag else ''}"
        case Shifted(cut, steps):
            return f"{placed(cut)}, {steps} before"
        case Returned(cut):
            return f"{placed(cut)}, gradient of the one before"
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
    return f"{size_text(nbytes):>9}"
