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
    if tensor.shape[1] == heads:
        return tensor
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _per_group(tensor: Tensor, groups: int) -> Tensor:
    return tensor if tensor.shape[1] == groups else tensor.unflatten(1, (groups, -1)).sum(2)


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


def _largest(sums: Tensor) -> Tensor:
    return sums[..., -1:].clone()


def _largest_fake(sums: Tensor) -> Tensor:
    return sums.new_empty((*sums.shape[:-1], 1))


_BLOCK = computed(f"block_attention({_GIVEN}) -> Tensor", _attend, _attend_fake)
_GRADIENTS = computed(
    f"block_attention_backward(Tensor grad, Tensor most, {_GIVEN}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
# In memory of its own: keeping it does not keep the rest.
LARGEST = computed("largest_scores(Tensor sums) -> Tensor", _largest, _largest_fake)


def _parts(pair: Tensor, features: int) -> tuple[Tensor, Tensor]:
    return pair[..., :features], pair[..., features:]


def _chosen(tensor: Tensor, first: int, earlier: Tensor | None) -> Tensor:
    """With `earlier`, two of a tensor's halves, side by side in the batch: see `rules/ring.py`.

    One half whatever `earlier` is, then the early one if it holds, or else the late one.
    """
    if earlier is None:
        return tensor
    halves = tensor.chunk(2, 2)
    return torch.cat([halves[first], torch.where(earlier, *halves)])


def _returned(grad: Tensor, first: int, earlier: Tensor | None) -> Tensor:
    """The gradient of a tensor, from that of what was chosen."""
    if earlier is None:
        return grad
    always, chosen = grad.chunk(2)
    halves = [torch.where(earlier, chosen, 0.0), torch.where(earlier, 0.0, chosen)]
    halves[first] = halves[first] + always
    return torch.cat(halves, 2)


EARLY, LATE = 0, 1


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
        scale: float,
    ) -> Tensor:  # fmt: skip
        found = _BLOCK(query, key, value, mask, causal, scale)
        ctx.save_for_backward(LARGEST(found), query, key, value, mask)
        ctx.causal, ctx.scale = causal, scale
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _GRADIENTS(grad.contiguous(), *ctx.saved_tensors, ctx.causal, ctx.scale)
        return *found, None, None, None


ATTEND = differentiated(f"attend({_GIVEN}) -> Tensor", _Attention)


# Keys and values that travel on are not kept for the backward: there, they come back from the next
# device, as the gradient of the second result, which nobody reads. They go on as that of `token`.
_PAIR = (
    "Tensor query, Tensor pair, Tensor? token, Tensor? mask, Tensor? earlier, int features, "
    "float scale"
)


def _run(query: Tensor, pair: Tensor, given: tuple[Any, ...]) -> Tensor:
    mask, earlier, features, scale = given
    queries, chosen = _chosen(query, LATE, earlier), _chosen(pair, EARLY, earlier)
    return _BLOCK(queries, *_parts(chosen, features), mask, False, scale)


def _backward(ctx: Any, grad: Tensor, pair: Tensor) -> tuple[Any, ...]:
    most, query, mask, earlier, *_ = ctx.saved_tensors
    chosen = _parts(_chosen(pair, EARLY, earlier), ctx.features)
    given = most, _chosen(query, LATE, earlier), *chosen, mask, False, ctx.scale
    of_query, *of_pair = _GRADIENTS(grad.contiguous(), *given)
    of_query = _returned(of_query, LATE, earlier)
    of_both = _returned(torch.cat(of_pair, -1), EARLY, earlier)
    return of_query, of_both, pair if ctx.token else None, None, None, None, None


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, pair: Tensor, token: Tensor | None, *given: Any
    ) -> tuple[Tensor, Tensor]:
        found = _run(query, pair, given)
        ctx.save_for_backward(LARGEST(found), query, *given[:2])
        ctx.token, ctx.features, ctx.scale = token is not None, *given[2:]
        return found, pair.new_zeros(pair.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, pair: Tensor) -> tuple[Any, ...]:
        return _backward(ctx, grad, pair)


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, token: Tensor | None, *given: Any) -> Tensor:
        found = _run(query, pair, given)
        ctx.save_for_backward(LARGEST(found), query, *given[:2], pair)
        ctx.token, ctx.features, ctx.scale = token is not None, *given[2:]
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _backward(ctx, grad, ctx.saved_tensors[-1])


ATTEND_AND_PASS = differentiated(f"attend_and_pass({_PAIR}) -> (Tensor, Tensor)", _Passing)
ATTEND_LAST = differentiated(f"attend_last({_PAIR}) -> Tensor", _Last)
