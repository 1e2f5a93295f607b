"""`einsum`: along any of its letters."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from piper.capture.graphs.division.calls import Call, Option
from piper.capture.graphs.division.rules.table import rule
from piper.ir.placement.placements import Cut, Partial, Placement, Replicated

aten = torch.ops.aten


def letters(equation: str) -> tuple[list[str], str]:
    """Those of each argument, and of the result.

    >>> letters("bij, bjk -> bik")
    (['bij', 'bjk'], 'bik')
    """
    given, _, result = equation.replace(" ", "").partition("->")
    every = given.split(",")
    if "->" not in equation:
        seen = "".join(every)
        result = "".join(sorted(one for one in set(seen) if seen.count(one) == 1))
    return every, result


@rule(aten.einsum)
def einsum(call: Call) -> Iterator[Option]:
    """A letter of the result cuts it. Along any other, sums are in parts."""
    equation = call.argument("equation")
    given, result = letters(equation)
    repeated = any(len(set(one)) < len(one) for one in given)
    if "." in equation or repeated or len(given) != len(call.operands):
        return
    for letter in dict.fromkeys("".join(given)):
        sizes = {s[g.index(letter)] for g, s in zip(given, call.shapes, strict=True) if letter in g}
        for blocks in call.blocks if len(sizes) == 1 else ():  # others are broadcast
            output = Cut(result.index(letter), blocks) if letter in result else Partial()
            yield Option(tuple(_placed(one, letter, blocks) for one in given), output)
    for k in range(len(given)):
        parts = tuple(Partial() if k == n else Replicated() for n in range(len(given)))
        yield Option(parts, Partial())


def _placed(given: str, letter: str, blocks: int) -> Placement:
    return Cut(given.index(letter), blocks) if letter in given else Replicated()
