"""What a plan says about its values before it runs."""

from __future__ import annotations

from collections.abc import Iterator

from piper.plan.instructions import (
    Add,
    Exchange,
    Free,
    Gather,
    Keep,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    Total,
)


def results(plan: Plan) -> Iterator[tuple[int, str]]:
    """What is there only once an instruction was waited for."""
    for k, one in enumerate(plan.instructions):
        match one:
            case Recv(value=name) | Reduce(into=name) | Gather(into=name):
                yield k, name


def brought(plan: Plan) -> Iterator[tuple[int, tuple[str, ...]]]:
    """What exchanges end with: several values each."""
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Exchange):
            yield k, one.writes


def ending(plan: Plan) -> dict[int, set[str]]:
    """For each Run, what ends before the next one: a bundle among it is the kernel's to empty.

    Kernels then let go of saved activations one by one, as autograd would.
    """
    found: dict[int, set[str]] = {}
    soon: set[str] = set()
    for position in reversed(range(len(plan.instructions))):
        match plan.instructions[position]:
            case Free(values):
                soon.update(values)
            case Run():
                found[position], soon = soon, set()
            case Send(value=value) | Keep(value=value) | Add(value=value) | Reduce(value=value):
                soon.discard(value)
            case Exchange(reads=values):
                soon.difference_update(values)
    return found


def counted(plan: Plan) -> Iterator[tuple[str, int]]:
    """The gradients that a total counts, and where it does."""
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Total):
            yield from ((grad, k) for grad in one.grads)
