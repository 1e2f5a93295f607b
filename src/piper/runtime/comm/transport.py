"""The communication backend of this process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from piper.runtime.comm.gloo import ProcessComm


def communicators(device: torch.device) -> ProcessComm:
    """NCCL between GPUs, or else the backend of the default process group."""
    if device.type == "cuda" and dist.is_initialized():
        from piper.runtime.comm.nccl import CudaComm

        return CudaComm(device)
    return ProcessComm(device)
