"""Products of experts. Their operators are in `models`, which registers these options for them."""

from __future__ import annotations

from collections.abc import Iterator

from piper.capture.graphs.division.calls import Call, Option
from piper.ir.placement.placements import Cut, Partial, Replicated


def grouped_product(call: Call) -> Iterator[Option]:
    """rows [T, d], weight [E, d, f], counts: column-parallel or row-parallel for every expert."""
    counts = Replicated()
    for blocks in call.blocks:
        yield Option((Replicated(), Cut(2, blocks), counts), Cut(1, blocks))
        yield Option((Cut(1, blocks), Cut(1, blocks), counts), Partial())
    yield Option((Partial(), Replicated(), counts), Partial())
    yield Option((Replicated(), Partial(), counts), Partial())


def permuted_rows(call: Call) -> Iterator[Option]:
    """rows, their order and its inverse: every feature moves alike."""
    orders = Replicated(), Replicated()
    for cut in call.cuts((1,)):
        yield Option((cut, *orders), cut)
    yield Option((Partial(), *orders), Partial())
