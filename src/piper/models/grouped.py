"""Rows sorted by expert, times the matrix of their expert: `piper::grouped_mm`.

The rows of all experts are in one tensor, one expert after the other. `counts` holds the number of
rows of each expert, so no row is dropped or padded. The number of rows may be known only when the
model runs, so the descriptions of the operators for the compiler do not depend on it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import infer_schema, register_autograd, register_fake
from torch.utils.flop_counter import register_flop_formula

from piper.capture.graphs.division.rules import expert_products
from piper.capture.graphs.division.rules.table import rule
from piper.capture.torch_private import fast_grouped_mm

_library = torch.library.Library("piper", "FRAGMENT")


def operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Like torch.library.custom_op, whose wrapper takes 40 us per call: too much for experts."""
    name = function.__name__
    _library.define(name + infer_schema(function, mutates_args=()))
    _library.impl(name, function, "CompositeExplicitAutograd")
    found: Callable[..., Tensor] = getattr(torch.ops.piper, name).default
    return found


@operator
def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """rows [T, d], weight [E, d, f], counts [E] (int64, with sum T) -> [T, f].

    An expert may have no rows, or all of them. `weight` may be a transposed view: it is not copied.
    """
    if _has_fast_kernel(rows, weight.shape[2]):
        return fast_grouped_mm(rows.contiguous(), weight, offs=_ends(counts))
    result = rows.new_empty(rows.shape[0], weight.shape[2])
    sizes = counts.tolist()  # one synchronization, not one per expert
    groups = zip(sizes, rows.split(sizes), weight.unbind(), result.split(sizes), strict=True)
    for size, some, matrix, out in groups:
        if size:
            torch.mm(some, matrix, out=out)
    return result


@operator
def grouped_mm_weight(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """rows [T, d], grad [T, f], counts [E] -> [E, d, f]: the gradient of `grouped_mm`'s weight."""
    if _has_fast_kernel(rows, grad.shape[1]):
        return fast_grouped_mm(rows.contiguous().t(), grad.contiguous(), offs=_ends(counts))
    result = rows.new_empty(counts.shape[0], rows.shape[1], grad.shape[1])
    sizes = counts.tolist()
    groups = zip(sizes, rows.t().split(sizes, 1), grad.split(sizes), result.unbind(), strict=True)
    for size, some, grads, out in groups:
        if size:
            torch.mm(some, grads, out=out)
        else:
            out.zero_()
    return result


@operator
def permute_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], where `inverse` undoes `order`: the gradient is rows[inverse].

    Plain indexing cannot know that no row is taken twice, so its gradient adds rows to zeros.
    Sorting tokens back took about twice as long that way on an H200.
    """
    return rows.index_select(0, order)


def _has_fast_kernel(rows: Tensor, width: int) -> bool:
    """Whether one CUDA kernel can run all experts: it needs bfloat16 and rows of whole 16 bytes."""
    suits = rows.is_cuda and rows.dtype is torch.bfloat16 and fast_grouped_mm is not None
    return suits and rows.shape[0] > 0 and rows.shape[1] % 8 == 0 and width % 8 == 0


def _ends(counts: Tensor) -> Tensor:
    """Where the rows of each expert end, for the CUDA kernel. The host does not read it."""
    return counts.cumsum(0, dtype=torch.int32)


@register_fake("piper::grouped_mm")
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@register_fake("piper::grouped_mm_weight")
def _(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(counts.shape[0], rows.shape[1], grad.shape[1])


@register_fake("piper::permute_rows")
def _(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _keep_orders(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, counts = ctx.saved_tensors
    need_rows, need_weight, _ = ctx.needs_input_grad
    of_rows = grouped_mm(grad, weight.transpose(1, 2), counts) if need_rows else None
    return of_rows, _weight_gradient(rows, grad, weight, counts) if need_weight else None, None


def _weight_gradient(rows: Tensor, grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """In the layout of the weight, so that a transposed weight needs no copy."""
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return grouped_mm_weight(grad, rows, counts).transpose(1, 2)
    return grouped_mm_weight(rows, grad, counts)


def _grouped_mm_weight_backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
    """For second derivatives, from the same two operators."""
    rows, grad, counts = ctx.saved_tensors
    return grouped_mm(grad, outer.transpose(1, 2), counts), grouped_mm(rows, outer, counts), None


def _permute_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    order, inverse = ctx.saved_tensors
    return permute_rows(grad, inverse, order), None, None


register_autograd("piper::grouped_mm", _grouped_mm_backward, setup_context=_keep)
register_autograd("piper::grouped_mm_weight", _grouped_mm_weight_backward, setup_context=_keep)
register_autograd("piper::permute_rows", _permute_rows_backward, setup_context=_keep_orders)


@register_flop_formula(torch.ops.piper.grouped_mm)
def grouped_mm_flops(rows: Any, weight: Any, counts: Any, **_: Any) -> int:
    """Every row is multiplied by one matrix, whichever its expert is."""
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.piper.grouped_mm_weight)
def grouped_mm_weight_flops(rows: Any, grad: Any, counts: Any, **_: Any) -> int:
    return 2 * rows[0] * rows[1] * grad[1]


rule(torch.ops.piper.grouped_mm)(expert_products.grouped_product)
rule(torch.ops.piper.permute_rows)(expert_products.permuted_rows)


def sort_by_expert(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, d] and its experts [tokens, k] -> a copy per choice, by expert; order, inverse.

    Row i of the result is choice `order[i] % k` of token `order[i] // k`; `inverse` undoes `order`.
    The sort is stable, so the tokens of one expert keep their order.
    """
    order = chosen.flatten().argsort(stable=True)
    places = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter(0, order, places)
    copies = x.unsqueeze(1).expand(-1, chosen.shape[1], -1).flatten(0, 1)
    return permute_rows(copies, order, inverse), order, inverse


def combine(rows: Tensor, order: Tensor, inverse: Tensor, score: Tensor) -> Tensor:
    """Undo `sort_by_expert`: each token [d] gets the sum of its k rows, weighted by score."""
    rows = permute_rows(rows, inverse, order).unflatten(0, score.shape)
    return (rows * score.unsqueeze(-1)).sum(1)
