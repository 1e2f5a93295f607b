"""`fill_diagonal_` in a trace: torch writes through `as_strided`, of which no gradient is known."""

from typing import Any

import torch
from torch import Tensor


def fill_diagonal(func: Any, tensor: Tensor, fill_value: Any, wrap: bool = False) -> Any:
    sizes = tensor.shape
    if len(sizes) < 2 or (len(sizes) > 2 and len(set(sizes)) > 1):
        return NotImplemented  # an error of torch
    return tensor.masked_fill_(diagonal(tensor, wrap), fill_value)


def diagonal(tensor: Tensor, wrap: bool) -> Tensor:
    """Where all indices are equal; with `wrap`, again and again below that in a tall matrix."""
    device, sizes = tensor.device, tensor.shape
    if wrap and len(sizes) == 2:
        numbers = torch.arange(tensor.numel(), device=device).view(sizes)
        return numbers % (sizes[1] + 1) == 0
    first, *others = (
        torch.arange(size, device=device).view(*[-1 if k == dim else 1 for k in range(len(sizes))])
        for dim, size in enumerate(sizes)
    )
    found = first == others[0]
    for other in others[1:]:
        found = found & (first == other)
    return found
