"""A device that goes away while tokens are on their way to experts is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "faulty_experts.py"


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "line"),
    [("kill", "device 1 failed"), ("stop", "device 1 held up the others")],
)
def test_a_device_that_goes_away_is_named(fault: str, line: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "piper", "run", "-n", "2", str(SCRIPT), fault],
        env={**os.environ, "PIPER_DEVICE": "cpu"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert found.returncode and line in found.stderr
