"""What a plan says about its values before it runs."""

from __future__ import annotations

from collections.abc import Iterator

from piper.plan.instructions import Exchange, Free, Plan, Run, Total, is_message


def results(plan: Plan) -> Iterator[tuple[int, str]]:
    """What is there only once an instruction was waited for."""
    for k, one in enumerate(plan.instructions):
        if is_message(one) and not isinstance(one, Exchange):
            yield from ((k, name) for name in one.defines)


def brought(plan: Plan) -> Iterator[tuple[int, tuple[str, ...]]]:
    """What exchanges end with: several values each."""
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Exchange):
            yield k, one.defines


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
            case one:
                soon.difference_update(one.uses)
    return found


def counted(plan: Plan) -> Iterator[tuple[str, int]]:
    """The gradients that a total counts, and where it does."""
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Total):
            yield from ((grad, k) for grad in one.grads)
