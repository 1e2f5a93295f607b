"""Files that are named and not there: an error, with a name that is like it in the same folder."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

import typer

TARGETS = (".py", ".json", ".csv")


def existing(path: Path) -> Path:
    """A target that is there. A misspelt name gets the one that was probably meant."""
    if not os.path.exists(path):  # False also for what cannot be a name
        raise typer.BadParameter(missing(path))
    return path


def missing(path: Path) -> str:
    near = get_close_matches(path.name, names_beside(path), 1)
    return f"file {str(path)!r} does not exist." + (
        f" Did you mean {path.with_name(near[0])}?" if near else ""
    )


def names_beside(path: Path) -> list[str]:
    """Files of the same folder that a command could be meant to read."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return []
    return sorted(name for name in names if name.endswith(TARGETS))
