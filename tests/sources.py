"""The files of src/piper as syntax trees: several tests look at them, and parsing takes seconds."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "piper"
FILES = sorted(ROOT.rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))
