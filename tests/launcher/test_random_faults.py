"""Random faults under random strategies and launchers: they end, name the culprit, leave nothing.

`python tests/launcher/test_random_faults.py 200` prints the table of so many runs. A second number
is the seed, and `summary FILE...` prints the summary of such tables.
"""

from __future__ import annotations

import random
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
STEPS = 4
STUCK = ("stop", "hang")
HEAD = "launcher  n  strategy  fault      at step  code   stop  restart  culprit  error  problems"


@dataclass(frozen=True, slots=True)
class Case:
    """A run: how it is started, and which fault comes where and when."""

    launcher: str
    n: int
    strategy: str
    fault: str
    at: int
    step: int
    after: float  # seconds of the step
    restarts: int

    @property
    def replicas(self) -> int:
        return {"dp": self.n, "zero3": self.n, "pp x dp": self.n // 2}.get(self.strategy, 1)


def drawn(count: int, seed: int = 0) -> Iterator[Case]:
    """torchrun names the culprit only if it does not restart, so every second run has none."""
    draw = random.Random(seed)
    for _ in range(count):
        n, launcher = draw.choice((2, 2, 4)), draw.choice(("piper", "piper", "torchrun", "ray"))
        strategy, fault = draw.choice([*STRATEGIES]), draw.choice(FAULTS)
        at, step = draw.randrange(n), draw.randrange(2, STEPS + 1)
        after = round(draw.uniform(0.0, 0.05), 4) if fault in ANY_MOMENT else 0.0
        restarts = draw.randrange(2) if launcher == "torchrun" else 1
        yield Case(launcher, n, strategy, fault, at, step, after, restarts)


@cache
def timeout(launcher: str, n: int) -> float:
    """Seconds. All that happens in a run must be faster, also on a busy host: measure its start."""
    return round(max(10.0, 2.0 * attempt(launcher, n, "--steps", "1").start), 1)


def outcome(case: Case) -> Outcome:
    given = ["--strategy", case.strategy, "--fault", case.fault, "--at", str(case.at)]
    given += ["--step", str(case.step), "--after", str(case.after), "--steps", str(STEPS)]
    given += ["--timeout", str(timeout(case.launcher, case.n))]
    return attempt(case.launcher, case.n, *given, "--once", restarts=case.restarts)


def error(case: Case, found: Outcome) -> float | None:
    """The largest error of the losses, after a restart."""
    expected = plain(case.replicas, STEPS)
    if not case.restarts or len(found.losses) != STEPS:
        return None
    return max(abs(a - b) for a, b in zip(found.losses, expected, strict=True))


def longest(case: Case) -> float:
    """Seconds that the run may take to stop."""
    stuck = case.fault in STUCK
    found = MOST + (timeout(case.launcher, case.n) if stuck else 0.0)
    if case.launcher == "torchrun":
        found += ASKING + (TORCHRUN if stuck else 0.0)
    return found


def culprit(case: Case, found: Outcome) -> int | None:
    return found.root_cause if case.launcher == "torchrun" else found.culprit


def wrong(case: Case, found: Outcome) -> Iterator[str]:
    """What is not as it should be."""
    if found.fault is None:
        yield "the fault did not come"
        return
    if bool(found.code) != (case.restarts == 0):
        yield f"it ended with {found.code}"
    named = case.launcher != "torchrun" or not case.restarts
    if named and case.fault != "nan" and culprit(case, found) != case.at:
        yield f"device {culprit(case, found)} was blamed"
    if case.fault == "nan" and "the loss is nan; it began in" not in found.errors:
        yield "the region of the NaN was not named"
    if found.seconds > longest(case):
        yield f"it took {found.seconds:.1f} s"
    difference = error(case, found)
    if case.restarts and (difference is None or difference > 1e-6):
        yield "its losses are others"
    yield from (f"{one} is left" for one in found.left)


def row(case: Case, found: Outcome) -> str:
    again = "-" if found.restart is None else f"{found.restart:.1f}"
    difference = error(case, found)
    exact = "-" if difference is None else f"{difference:.0e}"
    return (
        f"{case.launcher:8} {case.n:2}  {case.strategy:8}  {case.fault:9} {case.at:3} "
        f"{case.step:4}  {found.code:4}  {found.seconds:5.1f}  {again:>7}  "
        f"{culprit(case, found)!s:>7}  {exact:>5}  {'; '.join(wrong(case, found)) or 'none'}"
    )


def summary(files: list[str]) -> Iterator[str]:
    """A table for each kind of fault: runs, seconds to stop and to the next step, problems."""
    rows = [line for file in files for line in Path(file).read_text().splitlines()]
    found = [one for one in rows if one.startswith(("piper ", "torchrun ", "ray "))]
    yield "| fault | runs | median stop | longest stop | median restart | problems |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for fault in FAULTS:
        some = [one for one in found if one[23:32].strip() == fault]
        stops = [float(one[48:53]) for one in some]
        again = [float(one[55:62]) for one in some if one[55:62].strip() != "-"]
        bad = sum(one[80:].strip() != "none" for one in some)
        if some:
            yield (
                f"| {fault} | {len(some)} | {statistics.median(stops):.1f} s | {max(stops):.1f} s "
                f"| {statistics.median(again):.1f} s | {bad} |"
            )


@pytest.mark.soak
@pytest.mark.parametrize("case", drawn(8), ids=str)
def test_a_random_fault_ends_the_run_and_a_restart_goes_on(case: Case) -> None:
    found = outcome(case)

    assert [*wrong(case, found)] == [], found.errors


def main(first: str, *rest: str) -> None:
    if first == "summary":
        print("\n".join(summary([*rest])))
        return
    print(HEAD)
    for case in drawn(int(first), int(rest[0]) if rest else 0):
        found = outcome(case)
        print(row(case, found), flush=True)
        if any(wrong(case, found)):
            print(case, found.errors, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
