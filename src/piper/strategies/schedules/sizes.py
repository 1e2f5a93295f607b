"""The sizes that each schedule supports, and what to write instead of others."""

import logging
from math import prod

from piper.errors import Problem, StrategyError
from piper.names import amount

LOG = logging.getLogger("piper")
MOST_ACTIONS = 10_000_000  # forwards of one step, or replicas


def require_whole(name: str, **sizes: object) -> None:
    """
    >>> require_whole("gpipe", pp=2, dp=[1, 2])
    >>> require_whole("gpipe", pp=2.0)
    Traceback (most recent call last):
    piper.errors.StrategyError: gpipe: pp=2.0 is not a whole number
      fix: write pp=2
    """
    for size, found in sizes.items():
        if isinstance(found, str | float):
            what = f"{size}={found!r} is not a whole number"
            raise StrategyError.of(name, what, f"write {size}={whole_near(found)}")


def whole_near(found: str | float) -> int:
    """
    >>> whole_near("4"), whole_near(2.5), whole_near("two")
    (4, 2, 2)
    """
    try:
        return max(1, int(found))
    except (OverflowError, ValueError):
        return 2


def require_at_least(name: str, least: int, **sizes: int) -> None:
    few = {size: found for size, found in sizes.items() if found < least}
    problems = (
        Problem(f"{size}={found} is too small", f"write {size}={least} or more")
        for size, found in few.items()
    )
    if few:
        raise StrategyError(name, *problems)


def require_possible(name: str, dp: object, **sizes: int) -> None:
    """Refuse what no machine can hold, before it is tried: 1f1b of a billion stages."""
    given = {size: found for size, found in {**sizes, "dp": dp}.items() if isinstance(found, int)}
    actions = prod(max(1, found) for size, found in given.items() if size != "dp")
    if actions > MOST_ACTIONS or max(given.values(), default=0) > MOST_ACTIONS:
        text = ", ".join(f"{size}={found}" for size, found in given.items() if found != 1)
        raise StrategyError.of(
            name, f"{text} is more than any machine has",
            f"choose sizes whose product is {MOST_ACTIONS:,} or less",
        )  # fmt: skip


def require_virtual_stages(name: str, virtual: int, instead: str) -> None:
    if virtual < 2:
        what = f"virtual={virtual} leaves nothing to interleave: a rank needs at least 2 stages"
        raise StrategyError.of(name, what, f"write virtual=2 or more, or use {instead}")


def microbatches_per_round(name: str, pp: int, microbatches: int) -> int:
    """How many microbatches a rank runs through one stage before it moves on to its next stage."""
    rounds = rounds_of(pp, microbatches)
    if microbatches % rounds:
        what = (
            f"microbatches={microbatches} on pp={pp} is {rounds} rounds, and {microbatches} "
            f"microbatches do not divide into {rounds} equal rounds"
        )
        near = (str(nearest(pp, microbatches, step)) for step in (-1, 1))
        raise StrategyError.of(name, what, f"write microbatches={' or '.join(near)}")
    return microbatches // rounds


def rounds_of(pp: int, microbatches: int) -> int:
    return max(1, microbatches // pp)


def nearest(pp: int, microbatches: int, step: int) -> int:
    """The next number of microbatches, up or down, that makes equal rounds."""
    while microbatches % rounds_of(pp, microbatches):
        microbatches += step
    return microbatches


def note_bubble(name: str, devices: int, microbatches: int, needed: int | None = None) -> None:
    """Every device is busy at once only with as many microbatches as there are devices, or more."""
    needed = needed or devices
    if microbatches < needed:
        LOG.warning(
            "%s: %s cannot fill a pipeline of %d devices, and %d or more can; `piper schedule` "
            "shows how long devices are idle",
            name, amount(microbatches, "microbatch", "microbatches"), devices, needed,
        )  # fmt: skip


def require_mirror(name: str, pp: int) -> None:
    if pp < 2 or pp % 2:
        what = f"pp={pp} is not even and positive: devices d and pp-1-d have the same stages"
        near = " or ".join(f"pp={size}" for size in (pp - 1, pp + 1) if size >= 2 and pp > 0)
        raise StrategyError.of(name, what, f"write {near or 'pp=2'}")
