"""The folder of a run: checkpoints in folders of their own, and a file that says which is current.

runs/a/piper.json            which checkpoints there are; replaced at once when one is complete
runs/a/piper.lock            who saves here
runs/a/step-200/index.json   everything about a checkpoint but the bytes of its tensors
runs/a/step-200/0.safetensors, 0.json    tensors that process 0 wrote, and its random state
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper.errors import InputError
from piper.runtime.checkpoint.format.files import replace_file, sync_folder
from piper.runtime.checkpoint.format.problems import WHERE, damaged, refuse_file, refused
from piper.runtime.checkpoint.format.sealed_json import sealed, unsealed
from piper.runtime.checkpoint.format.strict_values import WRONG, count, text
from piper.runtime.checkpoint.index import INDEX, VERSION
from piper.runtime.checkpoint.lock import LOCK, FolderLock, unfinished

LOG = logging.getLogger("piper")
POINTER = "piper.json"
OURS = re.compile(r"step-[0-9]+(-[0-9a-f]{8})?")  # names of folders that may be removed
OLDER = (
    "resume it with the version of Piper that wrote it, write its state_dict() with safetensors, "
    "and give that file to trainer.load(...)"
)


@dataclass(frozen=True, slots=True)
class Kept:
    """A complete checkpoint of a folder."""

    folder: str
    steps: int
    digest: str  # of its index


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay: the newest ones, and those after every so many steps."""

    newest: int = 1
    every: int | None = None
    own: bool = True  # whether this run has saved or resumed what is there

    def __post_init__(self) -> None:
        for name, given in (("keep", self.newest), ("keep_every", self.every or 1)):
            if type(given) is not int:
                what = f"{name}={given!r} is not a number of checkpoints or steps"
                raise refused(what, f"write a whole number: {name}=2")
        if self.newest < 1 or (self.every is not None and self.every < 1):
            raise refused(
                f"keep={self.newest} and keep_every={self.every} keep nothing",
                "give numbers above 0",
            )

    def stay(self, known: Sequence[Kept]) -> list[Kept]:
        """
        >>> known = [Kept(f"step-{n}", n, "") for n in (5, 10, 15, 20)]
        >>> [one.steps for one in Keep(newest=1, every=10).stay(known)]
        [10, 20]
        """
        new = known[-self.newest :]
        return [one for one in known if one in new or (self.every and one.steps % self.every == 0)]


def is_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint, or a run that has saved one."""
    return (folder / POINTER).is_file() or (folder / INDEX).is_file()


def kept_in(folder: Path) -> list[Kept]:
    """All complete checkpoints of a run, the current one last."""
    path = folder / POINTER
    if not path.is_file():
        return []
    content = path.read_bytes()
    if (folder / ".metadata").exists():
        raise refused(f"{folder} was written by an older version of Piper", OLDER)
    return parsed(path, unsealed(path, content))


def parsed(path: Path, found: Mapping[str, Any]) -> list[Kept]:
    try:
        if found["version"] != VERSION:
            raise ValueError
        return [
            Kept(own_name(name), count(steps), text(digest))
            for name, steps, digest in found["checkpoints"]
        ]
    except WRONG:
        raise damaged(path, "was written by another version of Piper") from None


def own_name(name: str) -> str:
    if not OURS.fullmatch(name):
        raise ValueError
    return name


def current(folder: Path) -> Path:
    """The folder of the newest checkpoint of a run; or the folder itself, if it is one."""
    if (folder / INDEX).is_file():
        return folder
    known = kept_in(folder)
    if not known:
        there = ", ".join(f"{folder.parent / one.folder}" for one in kept_in(folder.parent))
        raise refused(f"{folder} is not a checkpoint", f"give {there}" if there else WHERE)
    return folder / known[-1].folder


def refuse_foreign(folder: Path) -> None:
    """Save only where nothing is, or where a run has saved before."""
    refuse_file(folder)
    if not folder.exists():
        return
    ours = (folder / POINTER).is_file() or (folder / LOCK).is_file()
    if not ours and any(folder.iterdir()):
        fix = f"choose a folder for checkpoints alone, such as {folder / 'checkpoints'}"
        raise refused(f"{folder} has other files, and no checkpoint", fix)


def refuse_lost_pointer(folder: Path) -> None:
    """Do not begin anew beside a checkpoint, unless a crash has left it behind incomplete."""
    whole = {path.parent.name for path in folder.glob(f"step-*/{INDEX}")} - unfinished(folder)
    if whole:
        raise refused(
            f"{folder} has {', '.join(sorted(whole))}, and no {POINTER} that says which is current",
            f"put {POINTER} back, resume from a checkpoint by its own folder, such as "
            f"{folder / min(whole)}, or use another folder",
        )


def begin(folder: Path, lock: FolderLock, steps: int) -> Path:
    """An empty folder for a new checkpoint. What a crash left behind is removed."""
    with lock.writing:
        known = {one.folder for one in kept_in(folder)}
        for left in lock.left if isinstance(lock.left, list) else ():
            if OURS.fullmatch(str(left)) and left not in known:
                remove(folder / left)
        lock.left = None
        name = f"step-{steps}"
        if (folder / name).exists():
            name = f"{name}-{secrets.token_hex(4)}"
        lock.note(name)
        (folder / name).mkdir()
    return folder / name


def finish(part: Path, lock: FolderLock, steps: int, digest: str, keep: Keep) -> None:
    """Make a checkpoint the current one, and remove those that need not stay."""
    folder = part.parent
    sync_folder(part)
    with lock.writing:
        before = kept_in(folder)
        others = [] if keep.own else [one for one in before if one.steps > steps]
        before = [one for one in before if one not in others]
        stay = keep.stay([*before, Kept(part.name, steps, digest)])
        rows = [[one.folder, one.steps, one.digest] for one in stay]
        body = {"version": VERSION, "steps": steps, "checkpoints": rows}
        gone = [one.folder for one in before if one not in stay]
        lock.note(part.name, *gone)
        replace_file(folder / POINTER, sealed(body))
        for name in gone:
            remove(folder / name)
        lock.note()
    if others:
        warn_of_others(folder, others[-1])


def warn_of_others(folder: Path, last: Kept) -> None:
    """A longer run is not replaced by one that has not resumed it."""
    LOG.warning(
        "%s has %s of a longer run, which stays, and is not current any more: "
        "trainer.resume(%r) before the first step goes on with it", folder, last.folder,
        str(folder / last.folder),
    )  # fmt: skip


def discard(part: Path) -> None:
    """Remove a checkpoint that failed. It stays if it is complete already, and a peer ended then:
    those before it may be gone. If the disk does not even say which are complete, it stays too:
    the error to be told is the one of the save.
    """
    try:
        known = {one.folder for one in kept_in(part.parent)}
    except (OSError, InputError):
        LOG.warning("%s is not complete, and cannot be removed", part)
        return
    if part.name not in known:
        remove(part)


def remove(folder: Path) -> None:
    """A link in place of a folder is removed, not what it points to."""
    if folder.is_symlink():
        folder.unlink()
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        LOG.warning("%s cannot be removed", folder)
