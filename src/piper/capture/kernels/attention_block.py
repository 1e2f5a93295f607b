"""Attention of queries with some of their keys, in a form that can be added up over blocks of keys.

A result is [batch, heads, queries, features + 2]: sums of values, weighted by exp(score - m), then
the sum of these weights, then m. Whatever m is, attention is the first divided by the second. So m
is a constant for derivatives, and a block's derivative needs its queries, keys, values and m, but
not its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from piper.capture.kernels.derivatives import computed, differentiated

aten = torch.ops.aten
SHORT = (torch.bfloat16, torch.float16)  # sums are kept in float32
SCORES = 2**24  # that are in memory at a time
_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale"


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    if _has_kernel(query, value, mask):
        return _fused(query, key, value, causal, scale)
    key, value = (_per_head(_long(one), query.shape[1]) for one in (key, value))
    found = []
    for rows in _slices(query, key):
        scores = _scores(_long(query[:, :, rows]), key, mask, causal, scale, rows)
        most = scores.amax(-1, keepdim=True)
        weights = (scores - _finite(most)).exp()
        found.append(torch.cat([weights @ value, weights.sum(-1, keepdim=True), most], -1))
    return torch.cat(found, 2)


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return _long(query).new_empty((*query.shape[:3], value.shape[-1] + 2))


def _gradients(
    grad: Tensor, most: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of queries, keys and values. Each score's is weight * (gradient of its value and of 1)."""
    if _has_kernel(query, value, mask):
        return _fused_gradients(grad, most, query, key, value, causal, scale)
    wide, heads = _long(query), query.shape[1]
    keys, values = (_per_head(_long(one), heads) for one in (key, value))
    dq, dk, dv = torch.empty_like(wide), torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _slices(query, keys):
        scores = _scores(wide[:, :, rows], keys, mask, causal, scale, rows)
        weights = (scores - _finite(most[:, :, rows])).exp()
        of_sum, of_ones = grad[:, :, rows, :-2], grad[:, :, rows, -2:-1]
        dv += weights.mT @ of_sum
        of_scores = weights * (of_sum @ values.mT + of_ones) * scale
        dq[:, :, rows] = of_scores @ keys
        dk += of_scores.mT @ wide[:, :, rows]
    shared = (_per_group(one, key.shape[1]) for one in (dk, dv))
    dk, dv = (one.to(query.dtype) for one in shared)
    return dq.to(query.dtype), dk, dv


def _gradients_fake(
    grad: Tensor, most: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _long(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in SHORT else tensor


def _per_head(tensor: Tensor, heads: int) -> Tensor:
    """Keys of several query heads, once for each of them."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _per_group(tensor: Tensor, groups: int) -> Tensor:
    return tensor.unflatten(1, (groups, -1)).sum(2)


def _slices(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Of queries, so that few scores are in memory at a time."""
    batch, heads, queries, _ = query.shape
    step = max(1, SCORES // (batch * heads * key.shape[2]))
    return (slice(k, min(k + step, queries)) for k in range(0, queries, step))


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, rows: slice
) -> Tensor:
    scores = (query @ key.mT) * scale
    if causal:
        places = torch.arange(rows.start, rows.stop, device=query.device).unsqueeze(1)
        later = torch.arange(key.shape[2], device=query.device) > places
        scores = scores.masked_fill_(later, float("-inf"))
    if mask is not None:
        here = mask[..., rows, :] if mask.shape[-2] > 1 else mask
        hidden = here.dtype == torch.bool
        scores = scores.masked_fill_(~here, float("-inf")) if hidden else scores + here
    return scores


def _finite(most: Tensor) -> Tensor:
    """Queries that see no key have weights of 0, and not of -inf - -inf."""
    return most.masked_fill(most == float("-inf"), 0.0)


def _has_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's flash attention can do it."""
    sizes = query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    return query.is_cuda and query.dtype in SHORT and mask is None and sizes


def _fused(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """Its result is normalized: m is the logarithm of the sum of exponentials."""
    heads = query.shape[1]
    given = query, _per_head(key, heads), _per_head(value, heads)
    out, most, *_ = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, scale=scale)
    most = most.unsqueeze(-1)
    return torch.cat([out.float(), torch.ones_like(most), most], -1)


def _fused_gradients(
    grad: Tensor, most: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Flash attention subtracts from each score's gradient that of its value times the result.

    It is given a result for which this product is the gradient of the sum of weights.
    """
    of_sum, of_ones = grad[..., :-2], grad[..., -2:-1]
    norm = of_sum.square().sum(-1, keepdim=True)
    result = of_sum * (-of_ones / norm).masked_fill(norm == 0, 0.0)
    heads, tokens = query.shape[1], key.shape[2]
    given = query, _per_head(key, heads), _per_head(value, heads)
    short = (one.to(query.dtype).contiguous() for one in (of_sum, result))
    out_grad, result = short
    empty = torch.empty(2, dtype=torch.uint64, device=query.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        out_grad, *given, result, most.squeeze(-1).contiguous(), None, None, query.shape[2],
        tokens, 0.0, causal, empty, empty.new_empty(()), scale=scale,
    )  # fmt: skip
    return dq, _per_group(dk, key.shape[1]), _per_group(dv, key.shape[1])


_BLOCK = computed(f"block_attention({_GIVEN}) -> Tensor", _attend, _attend_fake)
_GRADIENTS = computed(
    f"block_attention_backward(Tensor grad, Tensor most, {_GIVEN}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
        scale: float,
    ) -> Tensor:  # fmt: skip
        found = _BLOCK(query, key, value, mask, causal, scale)
        most = found[..., -1:].clone()  # a view would keep all of it
        ctx.save_for_backward(most, query, key, value, mask)
        ctx.causal, ctx.scale = causal, scale
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _GRADIENTS(grad.contiguous(), *ctx.saved_tensors, ctx.causal, ctx.scale)
        return *found, None, None, None


ATTEND = differentiated(f"attend({_GIVEN}) -> Tensor", _Attention)
