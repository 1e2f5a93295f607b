"""How a strategy and plain PyTorch agree, as text and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from piper.job.numerics import Comparison

FEW = 8  # parameters that are shown when all is well


def agreement(found: Comparison, every: bool = False) -> Iterator[str | Table]:
    """Steps, then parameters with the worst first, then the verdict."""
    yield heading(found)
    yield steps_table(found)
    yield parameters_table(found, every)
    yield from (f"note: {note}" for note in found.notes)
    yield verdict(found)


def heading(found: Comparison) -> str:
    replicas = f" of {found.replicas} replicas" if found.replicas > 1 else ""
    parts = f"{found.microbatches} microbatches{replicas}"
    return (
        f"\n{len(found.steps)} steps in {found.dtype}, {parts}: "
        "the strategy, and plain PyTorch in one process\n"
        "on random data like the example, integers from the range that it has"
    )


def steps_table(found: Comparison) -> Table:
    table = table_of("step", "loss", "plain", "gradient norm", "plain", "microbatches", "")
    for number, step in enumerate(found.steps, start=1):
        table.add_row(
            str(number),
            *(f"{value:.6g}" for value in (step.loss, step.expected_loss)),
            *(f"{value:.6g}" for value in (step.grad_norm, step.expected_grad_norm)),
            size(step.microbatches),
            word(step.difference, found.tolerance),
        )
    return table


def parameters_table(found: Comparison, every: bool) -> Table:
    """All that are wrong, and some of the others."""
    table = table_of("differences of", "first gradient", "all updates", "")
    shown = len(found.parameters) if every else max(FEW, len(found.wrong))
    for one in found.parameters[:shown]:
        table.add_row(
            one.name, size(one.gradient), size(one.update), word(one.difference, found.tolerance)
        )
    rest = len(found.parameters) - shown
    if rest > 0:
        table.add_row(f"{rest} more", "closer", "closer", "agree (--all shows them)")
    return table


def verdict(found: Comparison) -> str:
    limit = f"{found.tolerance:.1e} (half of the digits of {found.coarsest})"
    if found.agrees:
        count = len(found.parameters)
        return f"ok: losses, gradient norms and {count} parameters agree to {limit}"
    steps = sum(not step.difference <= found.tolerance for step in found.steps)
    parameters = f"{len(found.wrong)} of {len(found.parameters)} parameters"
    return (
        f"WRONG: {parameters} and {steps} of {len(found.steps)} steps differ by more than {limit}\n"
        "  fix: this is a bug of Piper, or a model that does something else in every run; please "
        "report it with the strategy"
    )


def table_of(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, column in enumerate(columns):
        is_number = 0 < k < len(columns) - 1
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    return table


def size(difference: float) -> str:
    return f"{difference:.1e}" if difference else "equal"


def word(difference: float, tolerance: float) -> str:
    return "agree" if difference <= tolerance else "WRONG"
