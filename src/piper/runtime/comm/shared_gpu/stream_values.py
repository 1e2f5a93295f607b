"""Numbers in GPU memory that streams wait for and write: no kernel, no SM and no thread waits."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares 32-bit numbers as a circle


def wait_for_value(address: int, least: int) -> None:
    """Whatever is queued next on the current stream waits until the number is at least that."""
    call("cuStreamWaitValue32_v2", address, least)


def write_value(address: int, value: int) -> None:
    """After everything queued so far on the current stream."""
    call("cuStreamWriteValue32_v2", address, value)


def call(name: str, address: int, value: int) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    number = ctypes.c_uint32(value & 0xFFFFFFFF)
    status = getattr(driver(), name)(stream, ctypes.c_uint64(address), number, AT_LEAST)
    if status:
        raise RuntimeError(f"{name} failed: error {status} of the CUDA driver")


@cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
