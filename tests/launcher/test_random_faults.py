"""Random faults under random strategies and launchers: they end, name the culprit, leave nothing.

`python tests/launcher/test_random_faults.py 200` prints the table of so many runs.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from launcher.fault_runs import Outcome, attempt
from scripts.faulty import STRATEGIES, plain

FAULTS = ("kill", "term", "stop", "hang", "exit 0", "exit 3", "os._exit", "exception", "segv")
TIMEOUT, MOST = 20.0, 10.0  # seconds; compiling must be faster than the first, also on a busy host
STEPS = 4


def drawn(count: int, seed: int = 0) -> Iterator[tuple[str, int, str, str, int, int]]:
    """Launcher, devices, strategy, fault, and where and when it comes."""
    draw = random.Random(seed)
    for _ in range(count):
        n = draw.choice((2, 2, 4))
        launcher = draw.choice(("piper", "piper", "torchrun", "ray"))
        where = draw.randrange(n), draw.randrange(1, STEPS)
        yield launcher, n, draw.choice([*STRATEGIES]), draw.choice(FAULTS), *where


def outcome(launcher: str, n: int, strategy: str, fault: str, at: int, step: int) -> Outcome:
    given = ["--strategy", strategy, "--fault", fault, "--at", str(at), "--step", str(step)]
    return attempt(launcher, n, *given, "--timeout", str(TIMEOUT), "--steps", str(STEPS))


def wrong(found: Outcome, launcher: str, fault: str, at: int) -> list[str]:
    """What is not as it should be. torchrun names the first process that failed, in its own way."""
    stuck = fault in ("stop", "hang")
    problems = [] if found.code else ["it ended well"]
    if launcher != "torchrun":
        problems += [] if found.culprit == at else [f"device {found.culprit} was blamed"]
        late = found.seconds > MOST + (TIMEOUT if stuck else 0.0)
        problems += [f"it took {found.seconds:.1f} s"] if late else []
    return problems + [f"{one} is left" for one in found.left]


def restarted(strategy: str, n: int) -> float:
    """The largest error of the losses of a run that was killed and started again."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["--strategy", strategy, "--fault", "kill", "--step", "3", "--steps", str(STEPS)]
        given += ["--checkpoint", f"{folder}/checkpoint", "--once", f"{folder}/once"]
        found = attempt("piper", n, *given, options=("--restarts", "2"))
    replicas = {"dp": n, "zero3": n, "pp x dp": n // 2}.get(strategy, 1)
    pairs = zip(found.losses, plain(replicas, STEPS), strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.soak
@pytest.mark.parametrize("given", drawn(8), ids=str)
def test_a_random_fault_ends_the_run(given: tuple[str, int, str, str, int, int]) -> None:
    found = outcome(*given)

    assert wrong(found, given[0], given[3], given[4]) == [], found.errors


@pytest.mark.soak
def test_a_run_that_is_started_again_has_the_losses_of_an_undisturbed_one() -> None:
    assert restarted("zero3", 2) < 1e-6


if __name__ == "__main__":
    print("launcher  devices  strategy  fault      at step  code  seconds  culprit  problems")
    for row in drawn(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        launcher, n, strategy, fault, at, step = row
        ended = outcome(*row)
        found = "; ".join(wrong(ended, launcher, fault, at)) or "none"
        print(
            f"{launcher:9} {n:7}  {strategy:8}  {fault:9} {at:3} {step:4}  {ended.code:4}  "
            f"{ended.seconds:7.1f}  {ended.culprit!s:7}  {found}",
            flush=True,
        )
