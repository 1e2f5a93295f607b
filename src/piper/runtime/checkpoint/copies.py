"""Copies of what a device holds, which later steps do not change, and their way to host memory."""

from __future__ import annotations

import torch

from piper.runtime.checkpoint.pieces import CHUNK, Pieces

RESERVE = 1 << 30  # bytes of a GPU that stay free


def copied(pieces: Pieces, device: torch.device) -> Pieces:
    """Copies on the same device, if it has room for them: then steps go on at once.

    Otherwise a GPU copies into pinned host memory, which torch reuses for the next save.
    """
    if device.type == "cuda" and not has_room(pieces, device):
        made = [(piece, pinned_copy(tensor)) for piece, tensor in pieces]
    else:
        made = [(piece, tensor.clone()) for piece, tensor in pieces]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return made


def has_room(pieces: Pieces, device: torch.device) -> bool:
    """Whether a GPU has room beside the largest step so far."""
    wanted = sum(tensor.numel() * tensor.element_size() for _, tensor in pieces)
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return wanted + RESERVE < free + unused


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


class HostMemory:
    """Host memory for one piece at a time. From a GPU, on a stream beside those of training."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None  # pinned
        self.stream: torch.cuda.Stream | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the CPU, contiguous, until the next one."""
        if not tensor.is_cuda:
            return tensor.cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = torch.empty(max(size, CHUNK), dtype=torch.uint8, pin_memory=True)
        self.stream = self.stream or torch.cuda.Stream(tensor.device)
        host = self.buffer[:size].view(tensor.dtype).view(tensor.shape)
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        self.stream.synchronize()
        return host
