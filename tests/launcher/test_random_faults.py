"""Random faults under random strategies and launchers: they end, name the culprit, leave nothing.

`python tests/launcher/test_random_faults.py 200` prints the table of so many faults. A second
number is the seed, and `summary FILE...` prints the summary of such tables. In each run, several
faults come one after the other. After each, the launcher starts the run again.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from launcher.fault_runs import Outcome, attempt
from scripts.faulty import ANY_MOMENT, FAULTS, STRATEGIES, plain

MOST = 10.0  # seconds to stop, after the timeout where nobody notices earlier
ASKING = 5.0  # seconds until the others know who is gone: Piper's launchers know it at once
TORCHRUN = 30.0  # seconds that torchrun gives a process which does not end on SIGTERM
IN_A_RUN = 5  # faults
STUCK = ("stop", "hang")
KINDS = "|".join(map(re.escape, FAULTS))
ROW = re.compile(
    rf"\w+ +\d  .{{8}}  (?P<fault>{KINDS}) +\d+ +\d +[\d.]+ +(?P<stop>[\d.]+) +(?P<again>\S+) "
    r"+\S+  (?P<problems>.*)"
)
HEAD = "launcher  n  strategy  fault      at step   after   stop  restart  culprit  problems"


@dataclass(frozen=True, slots=True)
class Fault:
    """What comes where and when."""

    kind: str
    at: int
    step: int  # of this attempt; 0: before the Trainer is made
    after: float  # seconds of it


@dataclass(frozen=True, slots=True)
class Case:
    """A run. torchrun says who was to blame only if it does not restart."""

    launcher: str
    n: int
    strategy: str
    faults: tuple[Fault, ...]
    restarts: int

    @property
    def replicas(self) -> int:
        return {"dp": self.n, "zero3": self.n, "pp x dp": self.n // 2}.get(self.strategy, 1)

    @property
    def steps(self) -> int:
        """Enough for a tenth of a second after each fault, at 7 ms a step on a quiet machine."""
        return 20 * len(self.faults) + 3


def drawn(count: int, seed: int = 0) -> Iterator[Case]:
    """So many faults."""
    draw = random.Random(seed)
    while count > 0:
        n, launcher = draw.choice((2, 2, 4)), draw.choice(("piper", "piper", "torchrun", "ray"))
        alone = launcher == "torchrun" and draw.random() < 0.5
        number = 1 if alone else min(count, IN_A_RUN)
        faults = tuple(one_fault(draw, n) for _ in range(number))
        yield Case(launcher, n, draw.choice([*STRATEGIES]), faults, 0 if alone else number)
        count -= number


def one_fault(draw: random.Random, n: int) -> Fault:
    kind, early = draw.choice(FAULTS), draw.random() < 0.15
    step = 0 if early and kind != "nan" else 2
    after = draw.uniform(0.0, 0.1 if step else 4.0) if kind in ANY_MOMENT else 0.0
    return Fault(kind, draw.randrange(n), step, round(after, 3))


@cache
def timeout(launcher: str, n: int) -> float:
    """Seconds. All that happens in a run must be faster, also on a busy host: measure its start."""
    return round(max(10.0, 2.0 * attempt(launcher, n, "--steps", "1").start), 1)


def outcome(case: Case) -> Outcome:
    faults = [(one.kind, one.at, one.step, one.after) for one in case.faults]
    given = ["--strategy", case.strategy, "--faults", json.dumps(faults)]
    given += ["--steps", str(case.steps), "--timeout", str(timeout(case.launcher, case.n))]
    return attempt(case.launcher, case.n, *given, restarts=case.restarts)


def longest(case: Case, fault: Fault) -> float:
    """Seconds that the run may take to stop."""
    stuck = fault.kind in STUCK
    found = MOST + (timeout(case.launcher, case.n) if stuck else 0.0)
    if stuck and fault.step == 0:  # the others wait once they have started too
        found += timeout(case.launcher, case.n) / 2
    if case.launcher == "torchrun":
        found += ASKING + (TORCHRUN if stuck else 0.0)
    return found


def culprits(case: Case, found: Outcome) -> list[int | None]:
    """Who was blamed for each fault; None where nobody says."""
    if case.launcher != "torchrun":
        return [*found.culprits]
    return [None] * len(case.faults) if case.restarts else [found.root_cause]


def wrong(case: Case, found: Outcome) -> Iterator[str]:
    """What is not as it should be in the whole run."""
    if len(found.stops) != len(case.faults):
        yield f"{len(found.stops)} faults came"
    if bool(found.code) != (case.restarts == 0):
        yield f"it ended with {found.code}"
    expected = plain(case.replicas, case.steps)
    if case.restarts and len(found.losses) != len(expected):
        yield f"it took {len(found.losses)} steps"
    elif case.restarts:
        error = max(abs(a - b) for a, b in zip(found.losses, expected, strict=True))
        if error > 2e-9:  # as many digits are printed
            yield f"its losses differ by {error:.0e}"
    nan = any(one.kind == "nan" for one in case.faults)
    if nan and "the loss is nan; it began in" not in found.errors:
        yield "the region of the NaN was not named"
    yield from (f"{one} is left" for one in found.left)


def wrong_with(case: Case, fault: Fault, stop: float, culprit: int | None) -> Iterator[str]:
    named = case.launcher != "torchrun" or not case.restarts
    if named and fault.kind != "nan" and culprit != fault.at:
        yield f"device {culprit} was blamed"
    if stop > longest(case, fault):
        yield f"it took {stop:.1f} s"


def table(case: Case, found: Outcome) -> Iterator[str]:
    """A row for each fault. What is wrong with the whole run stands in the last."""
    blamed = culprits(case, found) + [None] * len(case.faults)
    came = zip(case.faults, found.stops, found.restarts, strict=False)  # some may not have come
    for k, (fault, stop, again) in enumerate(came):
        problems = [*wrong_with(case, fault, stop, blamed[k])]
        problems += [*wrong(case, found)] if k == len(found.stops) - 1 else []
        shown = "-" if again is None else f"{again:.1f}"
        yield (
            f"{case.launcher:8} {case.n:2}  {case.strategy:8}  {fault.kind:9} {fault.at:3} "
            f"{fault.step:4}  {fault.after:6.3f}  {stop:5.1f}  {shown:>7}  {blamed[k]!s:>7}  "
            f"{'; '.join(problems) or 'none'}"
        )


def summary(files: list[str]) -> Iterator[str]:
    """A line for each kind of fault: how many, seconds to stop and to the next step, problems."""
    rows = [ROW.match(line) for file in files for line in Path(file).read_text().splitlines()]
    yield "| fault | times | median stop | longest stop | median restart | problems |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for fault in FAULTS:
        some = [row for row in rows if row and row["fault"] == fault]
        stops = [float(row["stop"]) for row in some]
        again = [float(row["again"]) for row in some if row["again"] != "-"]
        if stops and again:
            bad = sum(row["problems"] != "none" for row in some)
            yield (
                f"| {fault} | {len(some)} | {statistics.median(stops):.1f} s | {max(stops):.1f} s "
                f"| {statistics.median(again):.1f} s | {bad} |"
            )


@pytest.mark.soak
@pytest.mark.parametrize("case", drawn(20), ids=lambda case: f"{case.launcher} {case.strategy}")
def test_random_faults_end_the_run_and_a_restart_goes_on(case: Case) -> None:
    found = outcome(case)

    rows = [*table(case, found)]
    assert len(rows) == len(case.faults), found.errors
    assert [row for row in rows if not row.endswith("none")] == [], found.errors


def main(first: str, *rest: str) -> None:
    if first == "summary":
        print("\n".join(summary([*rest])))
        return
    print(HEAD)
    for case in drawn(int(first), int(rest[0]) if rest else 0):
        found = outcome(case)
        rows = [*table(case, found)]
        print(*rows, sep="\n", flush=True)
        if any(not row.endswith("none") for row in rows) or not rows:
            print(case, found.output, found.errors, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
