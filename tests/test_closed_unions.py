"""A new instruction or node: mypy names every place that forgot it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[1]
FLUSH = '''
from piper.plan.instructions.base import Base


@dataclass(frozen=True, slots=True)
class Flush(Base):
    """An instruction that nobody knows yet."""

    waits: Waits = ()

    stream = COMPUTE
    node = ""


Instruction = (
    Flush | '''
BARRIER = '''@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """A node that nobody knows yet."""

    id: NodeId
    tags: Tags = ()
    reads: tuple[Sum, ...]
    writes: tuple[ValueId, ...]
    devices: tuple[Device, ...]


Node = Barrier | '''


def forgotten(folder: Path, module: str, before: str, after: str) -> set[str]:
    """The modules in which mypy finds a dispatch that is not closed any more."""
    shutil.copytree(ROOT / "src" / "piper", folder / "piper")
    path = folder / "piper" / module
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
    settings = (ROOT / "pyproject.toml").read_text().replace('mypy_path = "src"', "")
    (folder / "pyproject.toml").write_text(settings)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(folder / ".cache")],
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    missing = r"piper/(\S+)\.py:\d+: error: Argument 1 to \"assert_never\""
    return set(re.findall(missing, done.stdout))


@pytest.mark.parametrize(
    ("module", "before", "after", "expected"),
    [
        (
            "plan/instructions/__init__.py", "\nInstruction = (\n    ", FLUSH,
            {
                "plan/check/symbolic_execution",  # its symbolic execution,
                "runtime/execute", "runtime/gpu/cuda_graphs",  # its execution, its recording
                "job/pricing",  # its price
            },
        ),
        (
            "ir/nodes.py", "Node = ", BARRIER,
            {
                "ir/local_dags", "ir/operations", "ir/sizes", "ir/text", "passes/schedule",
                "plan/lower/device_work",
                "view/view_data",
            },
        ),
    ],
    ids=["instruction", "node"],
)  # fmt: skip
def test_mypy_names_every_place_that_forgot_it(
    tmp_path: Path, module: str, before: str, after: str, expected: set[str]
) -> None:
    assert forgotten(tmp_path, module, before, after) == expected
