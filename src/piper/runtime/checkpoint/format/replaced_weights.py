"""New weights in place of old ones in a folder. If that fails, the old ones are still there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from piper.runtime.checkpoint.format.files import replace_file, sync_folder

PART = r"-\d{5}-of-\d{5}"


def index_name(file: str) -> str:
    return f"{file}.safetensors.index.json"


def weights_in(folder: Path, file: str) -> list[str]:
    """Names of files with weights that are there: one, or several and their index."""
    pattern = re.compile(rf"{re.escape(file)}({PART})?\.safetensors|{re.escape(index_name(file))}")
    return sorted(path.name for path in folder.iterdir() if pattern.fullmatch(path.name))


def put_in_place(
    folder: Path, new: Mapping[str, Path], index: tuple[str, bytes] | None, sign: str, file: str
) -> None:
    """`new`: complete files under other names, by the names that they get.

    One file replaces another at once. Several cannot: the old ones are set aside first, so that no
    one reads some of these and some of those.
    """
    old = weights_in(folder, file)
    if index is None:
        for name, path in new.items():
            path.replace(folder / name)
        sync_folder(folder)
        remove(folder, [name for name in old if name not in new])
        return
    before = {name: folder / f".{name}.{sign}.old" for name in old}
    try:
        move({folder / name: path for name, path in before.items()})
        move({path: folder / name for name, path in new.items()})
        sync_folder(folder)
        replace_file(folder / index[0], index[1])
    except BaseException:
        remove(folder, [name for name in (*new, index[0]) if is_new(name, before)])
        move({path: folder / name for name, path in before.items() if path.exists()})
        raise
    remove(folder, [path.name for path in before.values()])


def is_new(name: str, before: Mapping[str, Path]) -> bool:
    """Not an old one that was not yet set aside."""
    return name not in before or before[name].exists()


def move(paths: Mapping[Path, Path]) -> None:
    for before, after in paths.items():
        before.replace(after)


def remove(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
