"""What workers run in tests of the recipes."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_recipe(rank: int, script: str, arguments: list[str]) -> str:
    """What it prints."""
    path, printed = str(EXAMPLES / script), io.StringIO()
    before, sys.argv = sys.argv, [path, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    try:
        with redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
        sys.path.remove(str(EXAMPLES))
    return printed.getvalue()
