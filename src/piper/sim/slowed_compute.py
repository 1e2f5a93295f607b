"""Compute that takes longer while messages of its device are in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

Act = Callable[[], None]


@dataclass(eq=False)
class Running:
    """A computation in progress."""

    left: float  # seconds that it would still take alone
    since: float  # when that was known
    act: Act  # what to do when it ends
    tries: int = 0  # ends that were planned; only the last one counts


class SlowedCompute:
    """The computation of each plan: at most one at a time, since compute is one stream."""

    def __init__(
        self,
        factors: Sequence[float],
        now: Callable[[], float],
        after: Callable[[float, Act], None],
    ) -> None:
        self.factors, self.now, self.after = factors, now, after
        self.in_flight = [0] * len(factors)
        self.running: dict[int, Running] = {}

    def factor(self, plan: int) -> float:
        return self.factors[plan] if self.in_flight[plan] else 1.0

    def begin(self, plan: int, seconds: float, act: Act) -> None:
        self.running[plan] = Running(seconds, self.now(), act)
        self.plan_end(plan)

    def plan_end(self, plan: int) -> None:
        one = self.running[plan]
        one.tries += 1
        self.after(one.left * self.factor(plan), partial(self.end, plan, one, one.tries))

    def end(self, plan: int, one: Running, tries: int) -> None:
        if tries == one.tries:
            del self.running[plan]
            one.act()

    def messages(self, plan: int, more: int) -> None:
        """So many more messages are in flight, or fewer."""
        before = self.factor(plan)
        self.in_flight[plan] += more
        if plan in self.running and self.factor(plan) != before:
            one = self.running[plan]
            one.left -= (self.now() - one.since) / before
            one.since = self.now()
            self.plan_end(plan)
