"""The comparison of a strategy with plain PyTorch, as text and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from piper.names import amount

if TYPE_CHECKING:
    from piper.job.numerics import Comparison
    from piper.job.numerics.compare import Parameter

FEW = 8  # parameters shown if all agree


def numerics_report(found: Comparison, every: bool = False) -> Iterator[str | Table]:
    """Steps, then parameters with the worst first, then the verdict."""
    yield heading(found)
    yield steps_table(found)
    yield parameters_table(found, every)
    yield from (f"note: {note}" for note in found.notes)
    yield verdict(found)


def heading(found: Comparison) -> str:
    replicas = f" of {found.replicas} replicas" if found.replicas > 1 else ""
    parts = f"{amount(found.microbatches, 'microbatch', 'microbatches')}{replicas}"
    return (
        f"\n{amount(len(found.steps), 'step')} in {found.dtype}, {parts}: "
        "the strategy, and plain PyTorch in one process\n"
        "on random data like the example"
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
    """All parameters that are wrong, and some of the others."""
    table = table_of("differences of", "first gradient", "all updates", "")
    shown = len(found.parameters) if every else max(FEW, len(found.wrong))
    for one in found.parameters[:shown]:
        table.add_row(
            label(one), size(one.gradient), size(one.update), word(one.difference, found.tolerance)
        )
    rest = len(found.parameters) - shown
    if rest > 0:
        table.add_row(f"{rest} more", "closer", "closer", "agree (--all shows them)")
    return table


def label(one: Parameter) -> str:
    return f"{one.name} (buffer)" if one.is_buffer else one.name


def verdict(found: Comparison) -> str:
    limit = f"{found.tolerance:.1e} (half of the digits of {found.coarsest})"
    if found.agrees:
        buffers = sum(one.is_buffer for one in found.parameters)
        count = amount(len(found.parameters) - buffers, "parameter")
        both = f"{count} and {amount(buffers, 'buffer')}" if buffers else count
        return f"ok: losses, gradient norms and {both} agree to {limit}"
    wrong_steps = sum(not step.difference <= found.tolerance for step in found.steps)
    parameters = f"{len(found.wrong)} of {amount(len(found.parameters), 'parameter')}"
    steps = f"{wrong_steps} of {amount(len(found.steps), 'step')}"
    return (
        f"WRONG: {parameters} and {steps} differ by more than {limit}\n"
        "  fix: this is a bug in Piper, unless the model is not deterministic; please report it "
        "with the strategy"
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
