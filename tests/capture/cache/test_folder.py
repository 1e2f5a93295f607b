"""The folder of the cache: private, bounded, and never trusted more than its digests."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile import DEEP

from piper.capture.cache.derivatives import flags_in
from piper.capture.cache.folder import LARGEST, OFF, CacheFolder, folder_in


def test_what_was_written_is_read(tmp_path: Path) -> None:
    CacheFolder(tmp_path / "new").write("key", "text")

    assert CacheFolder(tmp_path / "new").read("key") == "text"
    assert CacheFolder(tmp_path / "new").read("other") is None


def test_only_the_owner_can_read_and_write(tmp_path: Path) -> None:
    CacheFolder(tmp_path / "new").write("key", "text")

    (file,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("at", range(0, 70, 7))
def test_an_entry_with_one_wrong_byte_is_missing(tmp_path: Path, at: int) -> None:
    folder = CacheFolder(tmp_path / "new")
    folder.write("key", "a text")
    (file,) = folder.path.iterdir()
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)

    assert folder.read("key") is None


def test_an_entry_that_was_cut_off_is_missing(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new")
    folder.write("key", "a text")
    (file,) = folder.path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])

    assert folder.read("key") is None


def test_an_entry_that_is_no_file_is_missing(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "cache")
    folder.write("a", "text")
    for make in (os.mkfifo, os.mkdir):
        path = folder.path / f"{make.__name__}.region"
        make(path)

        assert folder.read(make.__name__) is None
        folder.write(make.__name__, "new")  # whether or not it can be
    assert folder.read("a") == "text"


def test_an_entry_without_an_end_is_no_list_of_flags() -> None:
    assert flags_in(DEEP) is None


@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, bits: int) -> None:
    folder = CacheFolder(tmp_path / "new")
    folder.write("key", "text")
    folder.path.chmod(0o700 | bits)

    folder.write("other", "text")

    assert folder.read("key") is None
    assert len(list(folder.path.iterdir())) == 1


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CacheFolder(tmp_path / "new")
    folder.write("key", "text")
    monkeypatch.setattr(os, "getuid", lambda: folder.path.stat().st_uid + 1)

    assert folder.read("key") is None


def test_old_entries_make_room(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new", most=10_000)
    for k in range(400):
        folder.write(f"{k}", "x" * 100)

    left = sum(file.stat().st_size for file in folder.path.iterdir())
    assert left < 10_000 + 64 * 200
    assert folder.read("399") == "x" * 100


def test_captures_of_one_process_count_their_writes_together(tmp_path: Path) -> None:
    """So that not every capture looks at all entries."""
    here = {"PIPER_CACHE": str(tmp_path)}
    found = folder_in(here)

    assert found is not None and found is folder_in(here)
    assert found is not folder_in({"PIPER_CACHE": str(tmp_path / "other")})


def test_what_is_too_large_is_not_kept(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new")

    folder.write("key", "x" * (LARGEST + 1))

    assert folder.read("key") is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = CacheFolder(tmp_path / "file" / "new")

    folder.write("key", "text")

    assert folder.read("key") is None


def test_many_writers_leave_whole_entries(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new")
    texts = [f"{k}" * 1000 for k in range(8)]

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            list(threads.map(folder.write, ["key"] * 8, texts))
            assert folder.read("key") in texts

    assert len(list(folder.path.iterdir())) == 1


@pytest.mark.parametrize("said", [*OFF, "OFF"])
def test_it_can_be_turned_off(said: str) -> None:
    assert folder_in({"PIPER_CACHE": said}) is None


def test_by_default_it_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")

    found, named = folder_in({}), folder_in({"XDG_CACHE_HOME": "/scratch"})

    assert found is not None and found.path == Path("/home/ada/.cache/piper/regions")
    assert named is not None and named.path == Path("/scratch/piper/regions")
