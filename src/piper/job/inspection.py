"""Look at what a script would train, without training: its Trainer compiles, and says so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from piper.capture import Captured
from piper.directives import Strategy
from piper.job.compiler import Compiled


class Inspected(BaseException):
    """Raised instead of training when a tool only wants to look; nothing was started."""

    def __init__(
        self, trainer: Any, example: tuple[Any, ...], captured: Captured, compiled: Compiled
    ) -> None:
        super().__init__("inspected")
        self.trainer, self.example = trainer, example  # a Trainer that was configured only
        self.strategy: Strategy = trainer.strategy
        self.captured, self.compiled = captured, compiled


MANY = 64  # devices, above which tools look at one of each role
_looking = False


def is_inspecting() -> bool:
    return _looking


@contextmanager
def inspecting() -> Iterator[None]:
    """Inside, the first Trainer compiles and raises `Inspected`."""
    global _looking
    _looking = True
    try:
        yield
    finally:
        _looking = False


def looks_at_roles(devices: Collection[int]) -> bool:
    return _looking and len(devices) > MANY


def regions_text(captured: Captured) -> str:
    regions = captured.model.regions
    return f"{len(regions)} regions, {len({region.code for region in regions})} of them unique"


def plans_text(compiled: Compiled) -> str:
    count = sum(len(plan.instructions) for plan in compiled.plans)
    return f"and checked {len(compiled.plans)} plans, {count} instructions"
