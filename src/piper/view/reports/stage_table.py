"""Where the model was cut into stages, and what each stage weighs, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper.view.reports.footprint import size_text

TAGGED = "as tagged"  # in place of layers: the user has tagged the stage


@dataclass(frozen=True, slots=True)
class StageWeight:
    """One stage: its layers, and what it weighs for one microbatch."""

    stage: int
    layers: str
    parameters: int
    flops: float  # its part of all
    time: float  # its part of all, as costs expect it
    kept: int  # bytes of activations between forward and backward


def table(name: str, stages: Sequence[StageWeight]) -> str:
    """
    >>> print(table("PP", [StageWeight(0, "L 0 to 2", 1200, 0.75, 0.7, 2**20)]))
    stage  layers    parameters  FLOPs  time  activations
    PP=0   L 0 to 2       1,200   75 %  70 %      1.0 MiB
    """
    head = ("stage", "layers", "parameters", "FLOPs", "time", "activations")
    rows = [
        (
            f"{name}={one.stage}", one.layers, f"{one.parameters:,}", percent(one.flops),
            percent(one.time), size_text(one.kept),
        )
        for one in stages
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if k < 2 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


def line(name: str, stages: Sequence[StageWeight], costs: str) -> str:
    """
    >>> both = [StageWeight(0, "L 0 to 2", 1, 1, 0.7, 1), StageWeight(1, "L 3", 1, 1, 0.3, 1)]
    >>> line("PP", both, "measured costs")
    'cut into 2 stages: PP=0 L 0 to 2 (70 % of the time), PP=1 L 3 (30 %), by measured costs'

    Stages of the model itself are not cut.
    """
    first, *others = stages
    if all(one.layers == TAGGED for one in stages):
        times = [f"{name}={one.stage} ({percent(one.time)})" for one in others]
        begin = f"{name}={first.stage} ({percent(first.time)} of the time)"
        return f"{len(stages)} stages, as tagged: {', '.join([begin, *times])}, by {costs}"
    words = [f"{name}={one.stage} {one.layers} ({percent(one.time)})" for one in others]
    begin = f"{name}={first.stage} {first.layers} ({percent(first.time)} of the time)"
    return f"cut into {len(stages)} stages: {', '.join([begin, *words])}, by {costs}"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"
