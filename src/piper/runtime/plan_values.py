"""The values of a plan: results of messages, last uses, gradients of the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from piper.plan.instructions import Exchange, Free, Plan, Run, Total, is_message


def results(plan: Plan) -> Iterator[tuple[int, str]]:
    """The values that messages other than token all-to-alls define, with their positions."""
    for k, one in enumerate(plan.instructions):
        if is_message(one) and not isinstance(one, Exchange):
            yield from ((k, name) for name in one.defines)


def exchanged(plan: Plan) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The values that token all-to-alls define: several for each."""
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Exchange):
            yield k, one.defines


def ending(plan: Plan) -> dict[int, set[str]]:
    """For each Run, the values that are freed before the next one.

    The kernel may empty such a bundle: it releases saved activations one by one, as autograd does.
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
    """The gradients of the loss and norm all-reduce, with its position."""
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Total):
            yield from ((grad, k) for grad in one.grads)


def waited_for(plan: Plan, k: int, position: int) -> tuple[str, tuple[int, ...]]:
    """What message `k` is needed for at a position of the plan, and the devices it is between."""
    message, reader = plan.instructions[k], plan.instructions[position]
    queue = message.communicator(plan.device)
    return f"{message.text}, for {reader.node or reader.text}", queue.members if queue else ()


def picked(slots: Iterable[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Takes the contents of these slots from a list of all, with a single call if it can.

    >>> picked((2, 0))(["a", "b", "c"]), picked((1,))(["a", "b", "c"])
    (('c', 'a'), ['b'])
    """
    wanted = tuple(slots)
    return itemgetter(*wanted) if len(wanted) > 1 else lambda every: [every[k] for k in wanted]
