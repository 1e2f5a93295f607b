"""Correct plans, broken by hand in one place."""

from __future__ import annotations

from collections.abc import Sequence

from plan.mutants import Plans, changed, inserted, rearranged, with_code
from synthetic import chain

from piper.directives import Order, Place, Replicate, Split
from piper.ir.filters import where
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.instructions import Instruction, line


def two_devices() -> Compiled:
    """Two stages, one microbatch."""
    return compile_strategy(chain(2), [Place(where(PP=0), [0]), Place(where(PP=1), [1])])


def ordered() -> Compiled:
    """Two stages, two microbatches, and an order for the first stage."""
    slots = [where(PP=0, MB=k, PASS=p) for p, k in (("F", 0), ("F", 1), ("B", 0), ("B", 1))]
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]
    return compile_strategy(chain(2), [*places, Split("MB", 2), Order(slots)])


def ring() -> Compiled:
    """Four stages around three devices: the last one is where the first one is; a fourth device
    has the fifth stage."""
    places = [Place(where(PP=k), [k % 3]) for k in range(4)]
    return compile_strategy(chain(5), [*places, Place(where(PP=4), [3]), Split("MB", 2)])


def replicas(first: str = "a", second: str = "b") -> Compiled:
    """Two stages on the same two devices, reduced on streams of their own."""
    return compile_strategy(
        chain(2),
        [
            Place(where(), [0, 1]),
            Replicate(where(PP=0), [0, 1], reduce_stream=first),
            Replicate(where(PP=1), [0, 1], reduce_stream=second),
        ],
    )


def replicated_pipeline() -> Compiled:
    """Two replicas of two stages, of which one is looked at."""
    replicates = [Replicate(where(PP=0), [0, 2]), Replicate(where(PP=1), [1, 3])]
    places = [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])]
    return compile_strategy(chain(2), [*places, *replicates, Split("MB", 2)], by_role=True)


def find(plans: Plans, device: int, text: str) -> int:
    """The one instruction that prints like this."""
    (found,) = [k for k, one in enumerate(code_of(plans, device)) if line(one).startswith(text)]
    return found


def code_of(plans: Plans, device: int) -> tuple[Instruction, ...]:
    return next(plan.instructions for plan in plans if plan.device == device)


def in_order(plans: Plans, device: int, order: Sequence[int]) -> Plans:
    return with_code(plans, device, rearranged(code_of(plans, device), order))


def moved(plans: Plans, device: int, what: str, behind: str) -> Plans:
    """One instruction at another place than it should be."""
    at, after = find(plans, device, what), find(plans, device, behind)
    order = [k for k in range(len(code_of(plans, device))) if k != at]
    order.insert(order.index(after) + 1, at)
    return in_order(plans, device, order)


def swapped(plans: Plans, device: int, one: str, other: str) -> Plans:
    a, b = find(plans, device, one), find(plans, device, other)
    order = list(range(len(code_of(plans, device))))
    order[a], order[b] = order[b], order[a]
    return in_order(plans, device, order)


def without(plans: Plans, device: int, what: str) -> Plans:
    at = find(plans, device, what)
    return in_order(plans, device, [k for k in range(len(code_of(plans, device))) if k != at])


def twice(plans: Plans, device: int, what: str) -> Plans:
    at, code = find(plans, device, what), code_of(plans, device)
    return with_code(plans, device, inserted(code, at + 1, code[at]))


def hasty(plans: Plans, device: int, what: str) -> Plans:
    """One instruction that waits for nothing."""
    plan = next(plan for plan in plans if plan.device == device)
    return changed(plans, plan, find(plans, device, what), waits=())
