"""Max-min fair sharing of links and cores: the speed and end of every activity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

Demand = tuple[int, float]  # a resource, and how much of it: bytes of a link, core seconds
TOLERANCE = 1 - 1e-12  # for rounding errors


@dataclass(slots=True)
class Activity:
    """Something in progress: the fraction that is left, and its speed."""

    number: int
    demands: Sequence[Demand]
    fastest: float  # fractions per second, without contention
    left: float = 1.0
    speed: float = 0.0
    since: float = 0.0  # the time at which `left` was computed
    version: int = 0  # of its predicted end


@dataclass
class FairSharing:
    """The activities on every resource.

    An activity that wants less than an equal share gets what it wants. The others share the rest
    (max-min fairness).
    """

    capacity: list[float] = field(default_factory=list)
    users: list[dict[int, Activity]] = field(default_factory=list)  # by resource
    active: dict[int, Activity] = field(default_factory=dict)
    endings: list[tuple[float, int, int]] = field(default_factory=list)  # time, number, version

    def resource(self, capacity: float) -> int:
        self.capacity.append(capacity)
        self.users.append({})
        return len(self.capacity) - 1

    def begin(self, number: int, now: float, demands: Sequence[Demand], fastest: float) -> None:
        """Start an activity. `end` returns its number when it ends."""
        one = Activity(number, demands, fastest, since=now)
        self.active[number] = one
        for resource, _ in demands:
            self.users[resource][number] = one
        self.settle(now, one)

    def next_end(self) -> float | None:
        """When the next activity ends, if nothing else begins before."""
        while self.endings:
            time, number, version = self.endings[0]
            one = self.active.get(number)
            if one is not None and one.version == version:
                return time
            heappop(self.endings)
        return None

    def end(self) -> int:
        """Finish the activity that ends next, and return its number."""
        time, number, _ = heappop(self.endings)
        one = self.active.pop(number)
        for resource, _ in one.demands:
            del self.users[resource][number]
        self.settle(time, one)
        return number

    def settle(self, now: float, changed: Activity) -> None:
        """Recompute the speed of everything that shares a resource with what changed."""
        alone = changed.number in self.active and all(
            len(self.users[resource]) == 1 for resource, _ in changed.demands
        )
        touched = [changed] if alone else self.neighbours(changed)
        speeds = self.speeds(touched)
        for one, speed in zip(touched, speeds, strict=True):
            if speed != one.speed:
                self.set_speed(one, now, speed)

    def set_speed(self, one: Activity, now: float, speed: float) -> None:
        one.left = max(0.0, one.left - (now - one.since) * one.speed)
        one.since, one.speed = now, speed
        one.version += 1
        heappush(self.endings, (now + one.left / speed, one.number, one.version))

    def neighbours(self, changed: Activity) -> list[Activity]:
        """Everything that shares a resource with it, directly or through others."""
        found = {changed.number: changed} if changed.number in self.active else {}
        seen: set[int] = set()
        waiting = [resource for resource, _ in changed.demands]
        while waiting:
            resource = waiting.pop()
            if resource in seen:
                continue
            seen.add(resource)
            for number, one in self.users[resource].items():
                if number not in found:
                    found[number] = one
                    waiting += [other for other, _ in one.demands]
        return list(found.values())

    def speeds(self, touched: Sequence[Activity]) -> list[float]:
        """Fix those that cannot go faster, give what they leave to the others, and repeat."""
        if len(touched) == 1:
            return [self.alone(touched[0])]
        best = {one.number: self.alone(one) for one in touched}
        waiting = {one.number: one for one in touched}
        fixed: dict[int, float] = {}
        remaining = Remaining.of(self.capacity, touched)
        while waiting:
            shares = remaining.shares()
            now = {n: remaining.speed(one, best[n], shares) for n, one in waiting.items()}
            settled = [n for n in waiting if now[n] >= best[n] * TOLERANCE]
            settled = settled or remaining.held_back(waiting, now, shares)
            for number in settled:
                fixed[number] = now[number]
                remaining.take(waiting.pop(number), now[number])
        return [fixed[one.number] for one in touched]

    def alone(self, one: Activity) -> float:
        """Its speed without contention."""
        bounds = (self.capacity[r] / amount for r, amount in one.demands if amount)
        return min((one.fastest, *bounds))


@dataclass
class Remaining:
    """The remaining capacity of each resource, and how many activities still want some."""

    amount: dict[int, float]
    users: dict[int, int]

    @staticmethod
    def of(capacity: Sequence[float], touched: Sequence[Activity]) -> Remaining:
        users: dict[int, int] = {}
        for one in touched:
            for resource, _ in one.demands:
                users[resource] = users.get(resource, 0) + 1
        return Remaining({resource: capacity[resource] for resource in users}, users)

    def shares(self) -> dict[int, float]:
        """An equal share for each activity that still wants some."""
        return {r: max(0.0, self.amount[r]) / count for r, count in self.users.items() if count}

    def speed(self, one: Activity, best: float, shares: Mapping[int, float]) -> float:
        return min((best, *(shares[r] / amount for r, amount in one.demands if amount)))

    def held_back(
        self, waiting: Mapping[int, Activity], now: Mapping[int, float], shares: Mapping[int, float]
    ) -> list[int]:
        """The activities of a resource that none of them leaves unused.

        If there is no such resource: the activities limited by the one with the smallest shares.
        """
        full: dict[int, list[int]] = {}
        for number, one in waiting.items():
            for r, amount in one.demands:
                if now[number] * amount >= shares[r] * TOLERANCE:
                    full.setdefault(r, []).append(number)
        for resource, numbers in full.items():
            if len(numbers) == self.users[resource]:
                return numbers
        return full[min(full, key=shares.__getitem__)]

    def take(self, one: Activity, speed: float) -> None:
        for resource, amount in one.demands:
            self.amount[resource] -= speed * amount
            self.users[resource] -= 1


def total(demands: Iterable[Demand]) -> tuple[Demand, ...]:
    """One demand for each resource.

    >>> total([(0, 1.0), (1, 2.0), (0, 3.0)])
    ((0, 4.0), (1, 2.0))
    """
    found: dict[int, float] = {}
    for resource, amount in demands:
        found[resource] = found.get(resource, 0.0) + amount
    return tuple(found.items())
