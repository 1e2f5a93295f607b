"""What a recomputed region keeps besides its inputs."""

from __future__ import annotations

from dataclasses import dataclass

MATMULS, ATTENTION, TOPK = "matmuls", "attention", "topk"
COSTLY = "costly"  # all but what elementwise operators and norms compute from the rest
NAMES = (MATMULS, ATTENTION, TOPK, COSTLY)  # kinds of results that can be kept

RematPolicy = tuple[str, ...] | float
# Kinds of results, or a share of the bytes that the region would keep without recomputing.


@dataclass(frozen=True, slots=True)
class Recomputation:
    """That a region's backward recomputes, and what this changes for one microbatch."""

    keep: RematPolicy
    frees: int = 0  # bytes that do not wait for the backward
    flops: float = 0.0  # that the backward repeats
    auto: bool = False  # the compiler has yet to choose what is kept: everything so far


def policy_text(keep: RematPolicy) -> str:
    """
    >>> policy_text(()), policy_text(("matmuls", "attention")), policy_text(0.25)
    ('inputs', 'inputs, matmuls and attention', 'inputs and 25 % of the activations')
    >>> policy_text(("costly",))
    'all but results of elementwise operators and norms'
    """
    if isinstance(keep, float):
        return f"inputs and {100 * keep:g} % of the activations"
    if COSTLY in keep:
        return "all but results of elementwise operators and norms"
    *others, last = ("inputs", *keep)
    return f"{', '.join(others)} and {last}" if others else last
