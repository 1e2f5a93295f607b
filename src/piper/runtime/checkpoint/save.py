"""Saving: what the devices hold is copied, written beside training, and then becomes current."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper.runtime.checkpoint.copies import copied
from piper.runtime.checkpoint.description import Contents, contents_of
from piper.runtime.checkpoint.folder import Keep, begin, discard, finish, refuse_foreign, remove
from piper.runtime.checkpoint.format.files import digest_of, write_new
from piper.runtime.checkpoint.format.problems import refused
from piper.runtime.checkpoint.index import (
    INDEX,
    Described,
    Index,
    ProcessFile,
    StoredFile,
    StoredPiece,
)
from piper.runtime.checkpoint.lock import FolderLock, take_lock
from piper.runtime.checkpoint.peers import Peers
from piper.runtime.checkpoint.pieces import Pieces, Turns, saved_pieces
from piper.runtime.checkpoint.writer import write_pieces, write_process
from piper.runtime.state.device_state import DeviceState

SHOWN = 5.0  # seconds after which a shared file system shows a new folder to all hosts


@dataclass(frozen=True)
class Run:
    """What a Trainer says about a checkpoint."""

    steps: int
    model: Described
    replica: int
    replicas: int


@dataclass(frozen=True)
class Snapshot:
    """What one process writes."""

    run: Run
    pieces: Pieces
    values: Mapping[str, Any]  # of this process, as JSON
    contents: Contents


Share = tuple[list[StoredFile], list[StoredPiece], ProcessFile, Contents]


def snapshot(
    peers: Peers, run: Run, state: DeviceState, turns: Turns, values: Mapping[str, Any],
    rest: Callable[[], Pieces], copy: bool,
) -> Snapshot:  # fmt: skip
    """With `copy`, later steps do not change it. The first process also has the `rest`, which no
    step has used."""
    pieces = peers.each(lambda: saved_pieces(state, turns))
    pieces = copied(pieces, state.device) if copy else pieces
    pieces += peers.on_first(rest) or []
    return Snapshot(run, pieces, values, contents_of(state))


def opened(peers: Peers, folder: Path, steps: int, locks: dict[Path, FolderLock]) -> Path:
    """An empty folder for the new checkpoint, which all processes see.

    The first process locks the folder of the run until the end. Nothing is written if the others
    do not see it: each host may have a folder of this name.
    """

    def prepare() -> tuple[str, str]:
        refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if folder not in locks:
            locks[folder] = take_lock(folder)
        part, sign = begin(folder, locks[folder], steps), secrets.token_hex(16)
        (part / sign).touch()
        return str(part), sign

    name, sign = peers.from_first(prepare)
    part = Path(name)
    try:
        peers.each(lambda: refuse_unseen(part, sign))
        peers.on_first((part / sign).unlink)
    except BaseException:
        if peers.rank == 0:
            remove(part)
        raise
    return part


def refuse_unseen(part: Path, sign: str) -> None:
    until = time.monotonic() + SHOWN
    while not (part / sign).is_file():
        if time.monotonic() > until:
            raise refused(
                f"{part} was made by device 0, and is not seen here",
                "save to a folder that all hosts share",
            )
        time.sleep(0.05)


def write(peers: Peers, part: Path, lock: FolderLock | None, given: Snapshot, keep: Keep) -> None:
    """Write the part of each process. When all are complete, the checkpoint becomes current."""
    try:
        mine = peers.each(lambda: share(part, peers.rank, given))
        everyone = peers.everyone(mine)
        peers.on_first(lambda: complete(part, lock, given.run, everyone, keep))
    except BaseException:
        if peers.rank == 0:
            discard(part)
        raise


def share(part: Path, rank: int, given: Snapshot) -> Share:
    files, pieces = write_pieces(part, rank, given.pieces)
    process = write_process(part, rank, given.run.replica, given.values)
    return files, pieces, process, given.contents


def complete(
    part: Path, lock: FolderLock | None, run: Run, everyone: list[Share], keep: Keep
) -> None:
    """On the first process."""
    assert lock is not None
    index = Index(
        steps=run.steps,
        saved=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        replicas=run.replicas,
        model=run.model,
        optimizers=tuple(sorted(set[str]().union(*(one[3].optimizers for one in everyone)))),
        options=tuple(sorted(set().union(*(one[3].options for one in everyone)))),
        files=tuple(file for one in everyone for file in one[0]),
        pieces=tuple(piece for one in everyone for piece in one[1]),
        processes=tuple(one[2] for one in everyone),
    )
    refuse_incomplete(part, index)
    content = index.to_bytes()
    write_new(part / INDEX, [memoryview(content)])
    finish(part, lock, run.steps, digest_of(content), keep)


def refuse_incomplete(part: Path, index: Index) -> None:
    for file in index.files:
        path = part / file.name
        if not path.is_file() or path.stat().st_size != file.nbytes:
            raise refused(
                f"{path} was written by another device, and is not seen by device 0",
                "save to a folder that all hosts share",
            )
