"""Operators of ring attention on whole tensors. They stand in graphs until these are divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORT = (torch.bfloat16, torch.float16)
_library = torch.library.Library("piper", "FRAGMENT")
# The attention of each device's queries with the keys and values of the one `step` places before.
_GIVEN = (
    "Tensor query, Tensor pair, Tensor? mask, Tensor? token, int step, int features, bool causal, "
    "float scale"
)
_library.define(f"ring_block({_GIVEN}) -> Tensor")
# One of the others than the first and the last. Its second result is the `token` of the next.
_library.define(f"ring_passing({_GIVEN}) -> (Tensor, Tensor)")
_library.define("ring_sum(Tensor one, Tensor other) -> Tensor")
_library.define("ring_result(Tensor sums, ScalarType dtype) -> Tensor")

BLOCK = torch.ops.piper.ring_block.default
PASSING = torch.ops.piper.ring_passing.default
SUM = torch.ops.piper.ring_sum.default
RESULT = torch.ops.piper.ring_result.default


def _block_fake(
    query: Tensor, pair: Tensor, mask: Any, token: Any, step: int, features: int, *_: Any
) -> Tensor:
    dtype = torch.float32 if query.dtype in SHORT else query.dtype
    return query.new_empty((*query.shape[:3], pair.shape[-1] - features + 2), dtype=dtype)


def _passing_fake(query: Tensor, pair: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _block_fake(query, pair, *rest), pair.new_empty(pair.shape)


def _sum_fake(one: Tensor, other: Tensor) -> Tensor:
    return one.new_empty(one.shape)


def _result_fake(sums: Tensor, dtype: torch.dtype) -> Tensor:
    return sums.new_empty((*sums.shape[:-1], sums.shape[-1] - 2), dtype=dtype)


_library.impl("ring_block", _block_fake, "Meta")
_library.impl("ring_passing", _passing_fake, "Meta")
_library.impl("ring_sum", _sum_fake, "Meta")
_library.impl("ring_result", _result_fake, "Meta")
