"""A run that loses a device goes on with fewer: the strategy is a function of their number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.faulty import plain

SCRIPT = Path(__file__).parent.parent / "scripts" / "faulty.py"
STEPS = 12


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "n"), [("1f1b", 3), ("zb-h1", 4)])
def test_losses_are_those_of_a_run_without_the_fault(strategy: str, n: int, tmp_path: Path) -> None:
    faults = [("kill", 1, 3, 0.0), ("exception", 0, 2, 0.0)]
    found = subprocess.run(
        [
            sys.executable, "-m", "piper", "run", "-n", str(n), "--restarts", "2", "--least",
            str(n - 1), str(SCRIPT), "--strategy", strategy, "--steps", str(STEPS),
            "--faults", json.dumps(faults), "--checkpoint", str(tmp_path / "saved"),
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = (line.split() for line in found.stdout.splitlines() if line.startswith("step "))
    losses = {int(line[1]): float(line[3]) for line in lines}

    assert found.returncode == 0, found.stderr
    assert f"restart 2 of 2, with {n - 1} processes" in found.stderr
    assert [losses[k] for k in sorted(losses)] == pytest.approx(plain(1, STEPS), abs=2e-9)
