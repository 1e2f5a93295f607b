"""The script that runs everything on GPUs, here without one: it must not rot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
SCRIPTS = Path(__file__).parent.parent / "scripts"


def on_cpus(count: int, *arguments: str) -> str:
    """What the script says, all hidden GPUs aside."""
    command = [sys.executable, "-m", "piper", "run", "-n", str(count), SCRIPTS / "on_gpus.py"]
    found = subprocess.run(
        [*map(str, command), "--", "--dtype", "float32", "--how", "eager", *arguments],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PIPER_DEVICE": "cpu"},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.soak  # how the script for GPUs compares; run before it is run there
@pytest.mark.parametrize("name", ["skips", "dropout"])
def test_features_are_compared_with_plain_pytorch(name: str) -> None:
    assert f"ok    float32 eager feature: {name} " in on_cpus(2, "--match", f"feature: {name}")


@pytest.mark.soak
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_feature_is_as_plain_pytorch_has_it(count: int) -> None:
    assert on_cpus(count, "--match", "feature").count("ok    ") >= 12
