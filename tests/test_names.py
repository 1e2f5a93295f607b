"""Names are only printed: nothing parses one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from draws import drawn

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parent
SCRIPT = TESTS / "scripts" / "opaque_names.py"


def outcome(*words: str) -> list[str]:
    path = os.pathsep.join(map(str, (TESTS.parent / "src", TESTS)))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.splitlines()


@drawn
def test_strategies_compile_to_the_same_under_names_that_mean_nothing() -> None:
    named, opaque = outcome(), outcome("opaque")

    different = [(a, b) for a, b in zip(named, opaque, strict=True) if a != b]

    assert len(named) > 300
    assert not different
