"""What a derivative depends on besides the graph: versions, Piper's own code, settings of torch."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import backends

from piper.capture.cache.torch_private import intercepts_operators, private_settings

_SOURCE = Path(__file__).parents[1]  # of capture
_NOT_OF_TRACING = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE", "TORCH_DISTRIBUTED_")


def surroundings(device: str) -> str | None:
    """As text. None: code of the user may take part in a derivative, which no text describes."""
    if intercepts_operators():
        return None
    settings = [*_versions(), *_flags(), *_of_device(device), *private_settings()]
    return repr([*settings, *_variables(os.environ)])


@cache
def _versions() -> tuple[Any, ...]:
    """Piper is its own source: it may be edited without a new version."""
    digest = hashlib.sha256()
    for file in sorted(_SOURCE.rglob("*.py")):
        digest.update(f"{file.relative_to(_SOURCE)}\n".encode())
        digest.update(file.read_bytes())
    build = torch.__config__.show()
    return sys.version, platform.machine(), torch.__version__, build, digest.hexdigest()


def _flags() -> Iterator[Any]:
    yield torch.get_default_dtype()
    yield torch.get_default_device()
    yield torch.are_deterministic_algorithms_enabled()
    yield torch.is_deterministic_algorithms_warn_only_enabled()
    yield torch.get_float32_matmul_precision()
    yield torch.is_anomaly_enabled()
    yield sorted(torch.ops.loaded_libraries)
    yield torch.is_inference_mode_enabled()
    yield backends.cpu.get_cpu_capability()
    yield backends.mkldnn.is_available()
    yield backends.mha.get_fastpath_enabled()
    yield backends.opt_einsum.enabled, backends.opt_einsum.strategy
    yield backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic
    yield backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    yield backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    yield backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    yield backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()
    yield backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled()
    yield backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def _of_device(device: str) -> Iterator[Any]:
    kind = torch.device(device).type
    yield kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    if kind == "cuda":
        yield torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        yield torch.version.cuda, backends.cudnn.version()


def _variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Settings of torch in the environment, but for what differs from run to run.

    >>> _variables({"HOME": "/", "TORCH_LOGS": "", "TORCHELASTIC_RUN_ID": "4711"})
    [('TORCH_LOGS', '')]
    """
    return sorted(
        (name, value)
        for name, value in environment.items()
        if name.startswith(("TORCH", "PYTORCH")) and not name.startswith(_NOT_OF_TRACING)
    )
