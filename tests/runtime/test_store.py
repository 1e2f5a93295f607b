"""The store of a run is closed to strangers: a private file, or one address and a token."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from scripts.faulty import sockets

from piper.launcher import local
from piper.launcher.local import free_port
from piper.launcher.on_ray import LOCAL, meeting_place
from piper.runtime.processes.store import open_store

SOON = timedelta(seconds=5)
HELLO = b"\0" + (0x3C85F7CE).to_bytes(4, "little")  # what torch's own clients say first
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def test_a_run_on_one_host_meets_in_a_file_of_a_private_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(local.subprocess, "Popen", lambda _, env, **__: seen.append(env))
    before = sockets()

    with tempfile.TemporaryDirectory(prefix="piper-") as folder:
        local.start(0, 1, 1, ["train.py"], {}, Path(folder))
        open_store(SOON, seen[0]).set("a", "b")
        path = Path(seen[0]["PIPER_STORE"])
        mode = stat.S_IMODE(path.parent.stat().st_mode)

    assert mode == 0o700
    assert sockets() == before


def test_on_several_hosts_it_listens_on_one_address_and_keys_have_a_token() -> None:
    with meeting_place("auto") as given:
        port = free_port()
        store = open_store(SOON, {**ALONE, **given, "MASTER_PORT": str(port)})

        store.set("a", "b")

        stranger = dist.TCPStore("127.0.0.1", port, None, False, SOON)
        assert not stranger.check(["a"])
        assert [one for one in sockets() if one.endswith(f":{port:04X}")] == [
            f"0100007F:{port:04X}"
        ]
        assert len(given["PIPER_STORE_TOKEN"]) == 32


GARBAGE = (
    b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 4096,
    *(HELLO + bytes([query]) + size.to_bytes(8, "little") + b"abc"
      for query in range(12) for size in (2**31, 2**63)),
)  # fmt: skip


def test_a_stranger_who_sends_anything_disturbs_nobody() -> None:
    with meeting_place("auto") as given:
        known = {**ALONE, **given, "MASTER_PORT": str(free_port())}
        store = open_store(SOON, known)
        strangers = []
        for content in GARBAGE:
            strangers.append(socket.create_connection(("127.0.0.1", int(known["MASTER_PORT"]))))
            with suppress(OSError):
                strangers[-1].sendall(content)
            store.set("a", "b")

        assert open_store(SOON, {**known, "RANK": "1"}).get("a") == b"b"
        for one in strangers:
            one.close()


def test_a_cluster_on_this_machine_meets_in_a_file_too() -> None:
    with meeting_place(LOCAL) as given:
        folder = Path(given["PIPER_STORE"]).parent

        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    assert not folder.exists()


def test_an_attempt_of_torchrun_does_not_see_the_keys_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, None, True, SOON, wait_for_workers=False)
    given = {**ALONE, "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)

    open_store(SOON, {**os.environ}).set("a", "b")

    assert open_store(SOON, {**os.environ}).check(["a"])
    assert not open_store(SOON, {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1"}).check(["a"])
