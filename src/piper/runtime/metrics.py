"""Metrics of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Readings:
    """The numbers of a step, known once it is over."""

    loss: float
    grad_norm: float
    seconds: float
    memory_gib: float
    losses: Mapping[int, float] = field(default_factory=dict)


class Metrics:
    """The metrics of a step.

    Reading a metric waits for its step to finish. If you do not read it, the next step starts
    right away.
    """

    def __init__(self, step: int, tokens: int, read: Callable[[], Readings]) -> None:
        self.step, self.tokens, self.read = step, tokens, read

    @cached_property
    def readings(self) -> Readings:
        return self.read()

    @property
    def loss(self) -> float:
        return self.readings.loss

    @property
    def grad_norm(self) -> float:
        return self.readings.grad_norm

    @property
    def seconds(self) -> float:
        return self.readings.seconds

    @property
    def memory_gib(self) -> float:
        return self.readings.memory_gib

    @property
    def losses(self) -> Mapping[int, float]:
        """The losses of the microbatches whose last stage is on this device."""
        return self.readings.losses

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"step: {self.step}  loss: {self.loss:.5f}  grad_norm: {self.grad_norm:.4f}  "
            f"memory: {self.memory_gib:.2f}GiB  tps: {self.tokens_per_second:,.0f}"
        )

    __repr__ = __str__
