"""The site builds without a warning, and has the scripts that its pages link to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material", reason='pip install ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    source = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    done = subprocess.run(command, cwd=ROOT, env=source, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "Trains a model under a strategy" in (tmp_path / "site/api.html").read_text()
    api = (tmp_path / "site/api.html").read_text()
    assert '<a href="trainer.html">' in api and "<blockquote>" not in api and 'class="gp"' in api
    assert (tmp_path / "site/examples/lora.py.txt").is_file()
    assert 'class="gp"' in (tmp_path / "site/tutorial.html").read_text()  # prompts are not copied
