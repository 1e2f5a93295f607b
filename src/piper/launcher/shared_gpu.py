"""One GPU as several devices: each process gets a share of the SMs and uses NCCL.

NCCL does not allow two processes on one GPU unless they look like two hosts. So each gets its own
host id, and sockets as its network. Without MPS, the processes would take turns on the GPU. An MPS
daemon for this run lets them run at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from piper.errors import InputError, Problem
from piper.launcher.private_folder import private_folder

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def shared_gpu(processes: int) -> Iterator[Mapping[str, str]]:
    """Run an MPS daemon inside. Yields the environment variables of the processes.

    `{rank}` in a value stands for the rank of the process.
    """
    if shutil.which(CONTROL) is None:
        problem = Problem(
            f"this machine has no {CONTROL}, which divides a GPU",
            "install CUDA's MPS, or leave out --share-gpu and use one GPU per process",
        )
        raise InputError("--share-gpu", problem)
    quit_it = f'export CUDA_MPS_PIPE_DIRECTORY="$1"; echo quit | {CONTROL}'
    with private_folder("piper-mps-", quit_it) as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        (folder / "log").mkdir()
        subprocess.run([CONTROL, "-d"], env={**os.environ, **own}, check=True)
        try:
            yield {**own, **as_hosts(processes)}
        finally:
            quit_daemon({**os.environ, **own})


def as_hosts(processes: int) -> dict[str, str]:
    """Each process is a host of its own for NCCL, with its share of the GPU."""
    return {
        "PIPER_SHARE_GPU": "1",
        "NCCL_HOSTID": "piper-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // processes),
    }


def quit_daemon(environment: Mapping[str, str]) -> None:
    """Called after a failure too: a daemon that stays would occupy the GPU."""
    subprocess.run(
        [CONTROL], input=b"quit\n", env=dict(environment), check=False, capture_output=True,
        timeout=30,
    )  # fmt: skip
