"""What most strategies are compared with: one process and a plain loop, without Piper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def plain_losses(
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss_of: Callable[..., torch.Tensor],
) -> list[float]:
    """One step for each batch, which is a tuple or has keywords. Returns the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(*batch) if isinstance(batch, tuple) else loss_of(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
