"""`torch.normal` in a trace: random numbers from a counter, scaled and shifted."""

from typing import Any

import torch
from torch import Tensor


def normal(
    func: Any, mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None,
    out: Tensor | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """No gradient passes: what torch computes has none. `Normal.sample` ends here, too."""
    if generator is not None or out is not None:
        return NotImplemented
    with torch.no_grad():
        if size is not None:
            return torch.randn(size, **kwargs) * std + mean
        first = mean if isinstance(mean, Tensor) else std
        centre, spread = torch.broadcast_tensors(*map(torch.as_tensor, (mean, std)))
        noise = torch.randn(spread.shape, dtype=first.dtype, device=first.device)
        return noise * spread + centre
