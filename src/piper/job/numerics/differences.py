"""Differences between the tensors of devices and the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isnan
from typing import Any

import torch

from piper.job.numerics.reference import Reference
from piper.runtime.state.device_state import Part

FLOOR = 1e-3  # scales are at least this fraction of the largest


def gradient_differences(parts: Sequence[Part], reference: Reference) -> dict[str, float]:
    expected = {name: grad.flatten() for name, grad in reference.gradients.items()}
    for part in parts:  # zero, if plain PyTorch has no gradient
        zeros = torch.zeros(part.shape, dtype=part.values.dtype).flatten()
        expected.setdefault(part.name, zeros)
    nothing = {name: torch.zeros_like(grad) for name, grad in expected.items()}
    return largest_differences(parts, expected, nothing, scales(expected))


def update_differences(parts: Sequence[Part], reference: Reference) -> dict[str, float]:
    """Elements whose gradient is rounding noise count as equal: optimizers like Adam divide by its
    size, so their update is noise as well."""
    eps = float(torch.finfo(reference.coarsest).eps)
    before = {name: p.flatten() for name, p in reference.initial.items()}
    after = {name: p.flatten() for name, p in reference.final.items()}
    moved = {name: after[name] - before[name] for name in after}
    sizes = scales(reference.most)
    noise = {
        name: ((least < eps**0.25 * sizes[name]) & (reference.most[name] > 0)).flatten()
        for name, least in reference.least.items()
    }
    return largest_differences(parts, after, before, scales(moved), noise, rounding=4)


def scales(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The scale of each parameter: its largest element, but at least a thousandth of the largest of
    all. (Some gradients are zero up to rounding, such as that of a bias before a softmax.)"""
    floor = FLOOR * largest(tensors.values())
    return {name: max(largest([tensor]), floor) for name, tensor in tensors.items()}


def largest_differences(
    parts: Sequence[Part],
    expected: Mapping[str, torch.Tensor],
    otherwise: Mapping[str, torch.Tensor],
    scale: Mapping[str, float],
    noise: Mapping[str, torch.Tensor] | None = None,
    rounding: int = 0,
) -> dict[str, float]:
    """The largest difference of each tensor over all parts of it, on whatever device.

    `otherwise` is used where no device has a value. `noise` marks elements that are not compared.
    `rounding` is the number of ulps that may differ at any scale.
    """
    found = dict.fromkeys(expected, 0.0)
    missing = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in expected.items()}

    def look(name: str, where: Any, values: torch.Tensor) -> None:
        values, wanted = numbers(values), numbers(expected[name][where])
        slack = rounding * float(torch.finfo(wanted.dtype).eps) if rounding else 0.0
        apart = ((values - wanted).abs() - slack * wanted.abs()).clamp(min=0.0)
        if noise and name in noise:
            apart = apart.masked_fill(noise[name][where], 0.0)
        found[name] = worst(found[name], ratio(largest([apart]), scale[name]))

    for part in parts:
        where = place_of(part)
        missing[part.name][where] = False
        look(part.name, where, part.values)
    for name, left in missing.items():
        if left.any():
            look(name, left, otherwise[name][left])
    return found


def place_of(part: Part) -> Any:
    """Where the elements of a part are in the flat tensor."""
    span = slice(part.first, part.first + part.values.numel())
    return span if part.order.is_natural else part.order.indices(part.shape)[span]


def largest(tensors: Iterable[torch.Tensor]) -> float:
    return worst(*(float(numbers(one).abs().max()) for one in tensors if one.numel()))


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Truths and integers as numbers: buffers may be of any type.

    >>> largest([torch.tensor([True, False])]), largest([torch.tensor([-3], dtype=torch.int8)])
    (1.0, 3.0)
    """
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def relative(found: float, expected: float) -> float:
    return ratio(abs(found - expected), abs(expected))


def ratio(difference: float, scale: float) -> float:
    return difference / scale if scale else float(difference > 0)


def worst(*numbers: float) -> float:
    """The largest. NaN counts as infinite."""
    return max((inf if isnan(number) else number for number in numbers), default=0.0)
