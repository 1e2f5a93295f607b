"""Errors about checkpoints."""

from __future__ import annotations

from pathlib import Path

from piper.errors import InputError

CHECKPOINT = "checkpoint"  # what most errors here are about
WHERE = "give a folder that trainer.save wrote and that all processes can read"
SPACE = "choose a folder that all processes can read and write, with enough free space"
AGAIN = "resume from another checkpoint: `piper checkpoint show FOLDER` lists those that there are"


def refused(what: str, fix: str) -> InputError:
    return InputError.of(CHECKPOINT, what, fix)


def refuse_file(folder: Path, where: str = CHECKPOINT) -> None:
    """A folder cannot be made where a file is, or below one."""
    file = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    if file.exists() and not file.is_dir():
        raise InputError.of(where, f"{file} is a file, and not a folder", "choose another path")


def resolved(path: Path) -> Path:
    """Where a path leads, if it leads anywhere."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a zero byte
        raise refused(f"{path!r} is not a path: {error}", "give another one") from None


def damaged(path: Path, what: str) -> InputError:
    return refused(f"{path} {what}", AGAIN)
