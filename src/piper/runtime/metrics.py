"""What a step gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a step gave, the same on every device."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens: int
    memory_gib: float
    losses: Mapping[int, float] = field(default_factory=dict)  # of the microbatches that ended here

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"step: {self.step}  loss: {self.loss:.5f}  grad_norm: {self.grad_norm:.4f}  "
            f"memory: {self.memory_gib:.2f}GiB  tps: {self.tokens_per_second:,.0f}"
        )
