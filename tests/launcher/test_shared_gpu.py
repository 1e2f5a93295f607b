"""A daemon that divides a GPU is started for a run and stopped after it, whatever happened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import piper
from piper.errors import InputError
from piper.launcher.local import run_local
from piper.launcher.shared_gpu import CONTROL, shared_gpu

pytestmark = pytest.mark.processes


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that is called like MPS, and writes down how it was called."""
    log, control = tmp_path / "log", tmp_path / CONTROL
    control.write_text(f'#!/bin/sh\nif [ "$1" = -d ]; then echo start; else cat; fi >> {log}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def test_without_mps_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(InputError, match="leave out --share-gpu"), shared_gpu(2):
        pass


def test_the_daemon_ends_with_the_run(daemon: Path) -> None:
    with shared_gpu(4) as found:
        folder = Path(found["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir() and daemon.read_text() == "start\n"
        assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"

    assert daemon.read_text() == "start\nquit\n"
    assert not folder.exists()


def test_the_daemon_ends_when_the_run_fails(daemon: Path) -> None:
    with pytest.raises(RuntimeError), shared_gpu(2):
        raise RuntimeError

    assert daemon.read_text() == "start\nquit\n"


def test_every_process_is_a_host_of_its_own(
    daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(piper.__file__).parents[1]))
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['NCCL_HOSTID']).write_text('')\n"
    )
    with shared_gpu(2) as found:
        assert run_local(str(script), [], 2, found) == 0

    assert (tmp_path / "piper-0").exists() and (tmp_path / "piper-1").exists()
