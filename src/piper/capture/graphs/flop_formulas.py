"""Floating-point operations of operators that PyTorch's own counter does not know, or counts by
kernel.

A product of matrices [m, k] and [k, n] counts 2mkn. Attention counts the products of whole matrices
of scores, causal or not: two in the forward, four in the backward. What kernels compute again or
leave out does not count. So the same model counts the same on every device, as MFU is usually
defined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from piper.capture.torch_private import OpOverload

Formula = Callable[..., int]  # of an operator's arguments; tensors among them have no values


def operations(operator: OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """Of one call. 0 if the operator is not known to compute products."""
    name = operator.overloadpacket.__name__.removesuffix("_")
    if name in FORMULAS:
        return FORMULAS[name](*args, **kwargs)
    formula = flop_registry.get(getattr(torch.ops.aten, name, operator.overloadpacket))
    formula = formula or flop_registry.get(operator.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Queries with keys, then scores with values: [batch, heads, tokens, features]."""
    *heads, tokens, width = query.shape
    return 2 * prod(heads) * tokens * key.shape[-2] * (width + value.shape[-1])


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    return 2 * attention(query, key, value)


def block_attention_backward(grad: Tensor, most: Tensor, *given: Any) -> int:
    return 2 * attention(*given)


def linear(given: Tensor, weight: Tensor, *_: Any) -> int:
    return 2 * given.numel() * weight.shape[0]


def product(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Of matrices, or of a matrix and a vector, or of two vectors."""
    columns = other.shape[-1] if other.dim() > 1 else 1
    return 2 * one.numel() * columns


def added_product(_: Tensor, one: Tensor, other: Tensor, *__: Any, **___: Any) -> int:
    return product(one, other)


def outer(_: Tensor, one: Tensor, other: Tensor, **__: Any) -> int:
    return 2 * one.numel() * other.numel()


def grouped_product(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Rows in groups, each with a matrix of its own, or products of groups of columns."""
    if one.dim() == 3 and other.dim() == 2:
        return 2 * one.shape[1] * one.shape[2] * other.shape[1]
    return 2 * one.numel() * other.shape[-1]


def many_products(ones: list[Tensor], others: list[Tensor], *_: Any) -> int:
    return sum(map(product, ones, others))


def cholesky(matrix: Tensor, *_: Any, **__: Any) -> int:
    return prod(matrix.shape) * matrix.shape[-1] // 3


def lu(matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(matrix.shape) * matrix.shape[-1] // 3


def inverse(matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(matrix.shape) * matrix.shape[-1]


def solution(matrix: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """An LU decomposition, then two triangular systems for every column."""
    return lu(matrix) + 2 * triangular(matrix, right)


def triangular(matrix: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    columns = right.numel() // prod(matrix.shape[:-1])
    return prod(matrix.shape) * columns


FORMULAS: Mapping[str, Formula] = {
    "scaled_dot_product_attention": attention,
    "_scaled_dot_product_attention_math": attention,
    "_scaled_dot_product_attention_math_for_mps": attention,
    "_scaled_dot_product_flash_attention": attention,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_cudnn_attention": attention,
    "_scaled_dot_product_fused_attention_overrideable": attention,
    "_scaled_dot_product_flash_attention_backward": attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "_scaled_dot_product_efficient_attention_backward": attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": attention_backward,
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward,
    "block_attention": attention,
    "block_attention_backward": block_attention_backward,
    "linear": linear,
    "dot": product,
    "vdot": product,
    "mv": product,
    "_int_mm": product,
    "_weight_int8pack_mm": linear,
    "addmv": added_product,
    "addbmm": added_product,
    "_addmm_activation": added_product,
    "addr": outer,
    "_grouped_mm": grouped_product,
    "_scaled_grouped_mm": grouped_product,
    "_foreach_mm": many_products,
    "linalg_cholesky_ex": cholesky,
    "linalg_lu_factor_ex": lu,
    "linalg_inv_ex": inverse,
    "_linalg_solve_ex": solution,
    "linalg_solve_triangular": triangular,
}
