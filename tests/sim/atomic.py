"""Plans in which an overlapped pair is one piece of work, as the published closed forms take it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from piper.plan.instructions import Plan, Run, Send


def atomic(plan: Plan, pairs: Sequence[Sequence[str]]) -> Plan:
    """What the first of a pair sends starts when the second has ended."""
    order = list(delayed(plan, {name: k for k, pair in enumerate(pairs) for name in pair}))
    new = {old: k for k, old in enumerate(order)}
    moved = (plan.instructions[k] for k in order)
    return replace(
        plan,
        instructions=tuple(
            replace(one, waits=tuple(new[w] for w in one.waits)) if one.waits else one
            for one in moved
        ),
    )


def delayed(plan: Plan, pair_of: dict[str, int]) -> Iterator[int]:
    runs = [k for k, one in enumerate(plan.instructions) if isinstance(one, Run)]
    following = dict(zip(runs, runs[1:], strict=False))
    held: list[int] = []
    open_pair = False
    for k, one in enumerate(plan.instructions):
        if isinstance(one, Run):
            after = plan.instructions[following[k]] if k in following else None
            mine = pair_of.get(one.node)
            open_pair = mine is not None and after is not None and pair_of.get(after.node) == mine  # type: ignore[union-attr]
        if isinstance(one, Send) and open_pair:
            held.append(k)
            continue
        yield k
        if not open_pair:
            yield from held
            held = []
    yield from held
