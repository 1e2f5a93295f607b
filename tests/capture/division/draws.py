"""Tensors for trials of rules."""

from __future__ import annotations

from typing import Any

import torch
from capture.division.trials import Trial
from torch import Tensor

draw = torch.Generator().manual_seed(0)


def x(*shape: int) -> Tensor:
    """Positive numbers, so that logarithms and roots exist."""
    return torch.rand(shape, generator=draw, dtype=torch.float64) + 0.1


def signed(*shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def buffer(*shape: int) -> Tensor:
    """Without a gradient."""
    made = x(*shape)
    made.is_buffer = True  # type: ignore[attr-defined]
    return made


def index(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=draw)


def with_padding(token: int, tokens: Tensor) -> Tensor:
    tokens[0, 0] = tokens[1, 1] = token
    return tokens


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=draw) > 0.5


def trial(target: Any, *args: Any, blocks: tuple[int, ...] = (1,), **kwargs: Any) -> Trial:
    return Trial(target, args, kwargs, blocks)
