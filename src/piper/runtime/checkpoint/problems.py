"""Errors about checkpoints."""

from __future__ import annotations

from pathlib import Path

from piper.errors import InputError

WHERE = "give a folder that trainer.save wrote and that all processes can read"
SPACE = "choose a folder that all processes can read and write, with enough free space"
AGAIN = "resume from another checkpoint: `piper checkpoint show FOLDER` lists those that there are"


def refused(what: str, fix: str) -> InputError:
    return InputError.of("checkpoint", what, fix)


def damaged(path: Path, what: str) -> InputError:
    return refused(f"{path} {what}", AGAIN)
