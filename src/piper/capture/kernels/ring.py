"""Operators of ring attention on whole tensors. They stand in graphs until these are divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORT = (torch.bfloat16, torch.float16)
_library = torch.library.Library("piper", "FRAGMENT")
# The attention of each device's queries with the keys and values of the one `step` places before.
_library.define(
    "ring_block(Tensor query, Tensor pair, Tensor? mask, int step, int features, bool causal, "
    "float scale) -> Tensor"
)
_library.define("ring_sum(Tensor one, Tensor other) -> Tensor")
_library.define("ring_result(Tensor sums, ScalarType dtype) -> Tensor")

BLOCK = torch.ops.piper.ring_block.default
SUM = torch.ops.piper.ring_sum.default
RESULT = torch.ops.piper.ring_result.default


def _block_fake(
    query: Tensor, pair: Tensor, mask: Any, step: int, features: int, *_: Any
) -> Tensor:
    dtype = torch.float32 if query.dtype in SHORT else query.dtype
    return query.new_empty((*query.shape[:3], pair.shape[-1] - features + 2), dtype=dtype)


def _sum_fake(one: Tensor, other: Tensor) -> Tensor:
    return one.new_empty(one.shape)


def _result_fake(sums: Tensor, dtype: torch.dtype) -> Tensor:
    return sums.new_empty((*sums.shape[:-1], sums.shape[-1] - 2), dtype=dtype)


_library.impl("ring_block", _block_fake, "Meta")
_library.impl("ring_sum", _sum_fake, "Meta")
_library.impl("ring_result", _result_fake, "Meta")
