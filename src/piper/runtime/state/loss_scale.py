"""The loss scale of float16: small gradients do not vanish, and large ones are noticed.

It does what `torch.amp.GradScaler` does. All devices see the norm of all gradients, so they skip
the same steps and have the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piper.runtime.batch import StepInputs
from piper.runtime.gradient_norm import clip
from piper.runtime.torch_private import foreach_mul_

LARGEST = float(torch.finfo(torch.float32).max)


@dataclass
class DynamicLossScale:
    """The scale, and how it changes from step to step."""

    value: float
    growth: float
    backoff: float
    interval: int  # steps without overflow after which it grows
    good: int = 0  # such steps since it last changed
    finite: bool | None = None  # whether the gradients of this step are; None: not known yet

    def begin(self, batch: StepInputs) -> None:
        batch.scale, self.finite = self.value, None

    def is_finite(self, totals: torch.Tensor) -> bool:
        """Whether the gradients of all devices are. The host waits for their norm."""
        if self.finite is None:
            self.finite = bool(torch.isfinite(totals[1]))
        return self.finite

    def unscale(self, grads: Sequence[torch.Tensor]) -> None:
        foreach_mul_(list(grads), 1.0 / self.value)

    def end(self, totals: torch.Tensor) -> None:
        """Report the norm of the gradients without the scale, and choose the next one."""
        finite = self.is_finite(totals)
        totals[1] /= self.value**2
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value *= self.backoff
        elif self.good == self.interval:
            self.value, self.good = grown(self.value, self.growth), 0

    @property
    def saved(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"loss_scale": [self.value, self.good]}

    def restore(self, saved: Sequence[float]) -> None:
        self.value, self.good = float(saved[0]), int(saved[1])


def grown(value: float, growth: float) -> float:
    return value * growth if value * growth <= LARGEST else value


def ready(
    grads: Sequence[torch.Tensor], totals: torch.Tensor, max_norm: float | None,
    scale: DynamicLossScale | None,
) -> bool:  # fmt: skip
    """Unscale gradients, and clip them by the norm of all. False if the step must be skipped."""
    norm = totals[1].sqrt()
    if scale is not None:
        if not scale.is_finite(totals):
            return False
        scale.unscale(grads)
        norm = norm / scale.value
    if max_norm is not None:
        clip(grads, norm, max_norm)
    return True
