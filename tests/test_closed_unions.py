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


EDITS = (
    ("plan/instructions/__init__.py", "\nInstruction = (\n    ", FLUSH),
    ("ir/nodes.py", "Node = ", BARRIER),
)
EXPECTED = {
    "Flush": {
        "plan/check/symbolic_execution",  # its symbolic execution,
        "runtime/execute", "runtime/gpu/cuda_graphs",  # its execution, its recording
        "job/compile/pricing",  # its price
    },
    "Barrier": {
        "ir/by_device/local_dags", "ir/operations", "ir/sizes", "ir/text/text", "passes/schedule",
        "plan/lower/device_work",
        "view/node_labels", "view/view_data",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Where mypy finds a dispatch that is not closed any more, and for which type."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src" / "piper", folder / "piper")
    for module, before, after in EDITS:
        path = folder / "piper" / module
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, after))
    settings = (ROOT / "pyproject.toml").read_text().replace('mypy_path = "src"', "")
    (folder / "pyproject.toml").write_text(settings)
    if (ROOT / ".mypy_cache").exists():  # what mypy knows of torch need not be found again
        shutil.copytree(ROOT / ".mypy_cache", folder / ".mypy_cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=folder, capture_output=True, text=True, timeout=600
    )
    missing = (
        r"piper/(\S+)\.py:\d+: error: Argument 1 to \"assert_never\" "
        r"has incompatible type \"([^\"]+)\""
    )
    return [(where, kind) for where, kind in re.findall(missing, done.stdout)]


@pytest.mark.soak  # mypy reads all of Piper again
@pytest.mark.parametrize("kind", EXPECTED)
def test_mypy_names_every_place_that_forgot_it(kind: str, forgotten: list[tuple[str, str]]) -> None:
    assert {where for where, forgot in forgotten if kind in forgot} == EXPECTED[kind]
