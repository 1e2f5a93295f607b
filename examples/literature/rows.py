"""Rows of schedules as text: what each rank runs, in order."""

from itertools import zip_longest

import piper


def passes(phase: str, stages, microbatches) -> list[str]:
    return [f"{stage}{phase}{k}" for stage in stages for k in microbatches]


def in_turn(first: list[str], second: list[str]) -> list[str]:
    return [one for pair in zip_longest(first, second) for one in pair if one]


def from_rows(rows, **options) -> piper.Strategy:
    return piper.strategies.from_csv("\n".join(map(",".join, rows)), **options)
