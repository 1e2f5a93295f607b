"""Which way the messages of this process take."""

from __future__ import annotations

import torch
import torch.distributed as dist

from piper.runtime.comm.gloo import ProcessComm


def communicators(device: torch.device) -> ProcessComm:
    """NCCL between GPUs; else whatever all processes were joined by."""
    if device.type == "cuda" and dist.is_initialized():
        from piper.runtime.comm.nccl import CudaComm

        return CudaComm(device)
    return ProcessComm(device)
