"""Counted work against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import piper
from piper.capture import capture
from piper.capture.graphs.flops import flops_of
from piper.names import B, F

aten = torch.ops.aten
ROWS, QUERIES, KEYS, WIDTH, VALUES, HEADS = 2, 6, 10, 4, 8, 3
SCORES = ROWS * HEADS * QUERIES * KEYS  # elements
BOTH = 2 * SCORES * (WIDTH + VALUES)  # queries with keys, scores with values
Q, K, V = (ROWS, HEADS, QUERIES, WIDTH), (ROWS, HEADS, KEYS, WIDTH), (ROWS, HEADS, KEYS, VALUES)
OUT = (ROWS, HEADS, QUERIES, VALUES)


def counted(operator: Any, *given: Any) -> int:
    """The operations of one call. Tuples are the shapes of tensors."""
    graph = fx.Graph()

    def argument(one: Any) -> Any:
        if isinstance(one, list):
            return [argument(each) for each in one]
        if not isinstance(one, tuple):
            return one
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(one, device="meta")
        return node

    node = graph.call_function(operator, tuple(map(argument, given)))
    node.meta["val"] = torch.empty((), device="meta")
    return flops_of(node)


FORWARDS = [
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable, aten.scaled_dot_product_attention,
]  # fmt: skip
BACKWARDS = [
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
]


@pytest.mark.parametrize("operator", FORWARDS, ids=str)
def test_attention_counts_two_products_of_whole_scores_on_every_device(operator: Any) -> None:
    assert counted(operator.default, Q, K, V) == BOTH
    few_keys = (ROWS, 1, KEYS, WIDTH), (ROWS, 1, KEYS, VALUES)
    assert counted(operator.default, Q, *few_keys) == BOTH


@pytest.mark.parametrize("operator", BACKWARDS, ids=str)
def test_its_backward_counts_four(operator: Any) -> None:
    assert counted(operator.default, OUT, Q, K, V, OUT) == 2 * BOTH


PRODUCTS: list[tuple[Any, tuple[Any, ...], int]] = [
    (aten.mm.default, ((2, 3), (3, 5)), 2 * 2 * 3 * 5),
    (aten.addmm.default, ((5,), (2, 3), (3, 5)), 2 * 2 * 3 * 5),
    (aten.addmm_.default, ((2, 5), (2, 3), (3, 5)), 2 * 2 * 3 * 5),
    (aten._addmm_activation.default, ((5,), (2, 3), (3, 5)), 2 * 2 * 3 * 5),
    (aten.bmm.default, ((7, 2, 3), (7, 3, 5)), 7 * 2 * 2 * 3 * 5),
    (aten.baddbmm.default, ((7, 2, 5), (7, 2, 3), (7, 3, 5)), 7 * 2 * 2 * 3 * 5),
    (aten.addbmm.default, ((2, 5), (7, 2, 3), (7, 3, 5)), 7 * 2 * 2 * 3 * 5),
    (aten.linear.default, ((7, 2, 3), (5, 3)), 7 * 2 * 2 * 3 * 5),
    (aten.mv.default, ((2, 3), (3,)), 2 * 2 * 3),
    (aten.addmv.default, ((2,), (2, 3), (3,)), 2 * 2 * 3),
    (aten.dot.default, ((3,), (3,)), 2 * 3),
    (aten.addr.default, ((2, 3), (2,), (3,)), 2 * 2 * 3),
    (aten._int_mm.default, ((2, 3), (3, 5)), 2 * 2 * 3 * 5),
    # rows in groups, each with its own matrix; all with a matrix each; groups of rows summed up
    (aten._grouped_mm.default, ((12, 3), (4, 3, 5), (4,)), 2 * 12 * 3 * 5),
    (aten._grouped_mm.default, ((4, 2, 3), (4, 3, 5)), 4 * 2 * 2 * 3 * 5),
    (aten._grouped_mm.default, ((3, 12), (12, 5), (4,)), 2 * 3 * 12 * 5),
    (aten._grouped_mm.default, ((4, 2, 3), (3, 20), (4,)), 2 * 2 * 3 * 20),
    (aten.linalg_inv_ex.default, ((7, 3, 3),), 7 * 2 * 3**3),
    (aten.linalg_cholesky_ex.default, ((7, 3, 3),), 7 * 3**3 // 3),
    (aten._linalg_solve_ex.default, ((3, 3), (3, 5)), 2 * 3**3 // 3 + 2 * 3 * 3 * 5),
    (aten.linalg_solve_triangular.default, ((3, 3), (3, 5)), 3 * 3 * 5),
    (aten.add.Tensor, ((2, 3), (2, 3)), 0),
    (aten.softmax.int, ((2, 3), -1), 0),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "given", "count"), PRODUCTS, ids=lambda one: str(one)[:40])
def test_products_count_as_by_hand(operator: Any, given: tuple[Any, ...], count: int) -> None:
    assert counted(operator, *given) == count


class Model(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.randn(shape)), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight)


def work_of(compute: Callable[[Tensor, Tensor], Tensor], x: Tensor, *shape: int) -> list[float]:
    """Forward and backward of a model with one weight, whose input needs a gradient, too."""
    found = capture(
        nn.Sequential(Model(lambda x, w: x * w, x.shape[-1]), Marked(Model(compute, *shape))),
        lambda output, labels: output.square().mean() + 0 * labels.mean(),
        (x, x),
    ).model
    region = next(one for one in found.regions if one.tags)
    return [region.flops[F], region.flops[B]]


class Marked(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            return self.inside(x)


def attend(causal: bool, mask: bool, x: Tensor, weight: Tensor) -> Tensor:
    heads = (x * weight).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    bias = torch.zeros(QUERIES, QUERIES) if mask else None
    return functional.scaled_dot_product_attention(
        heads, heads, heads, attn_mask=bias, is_causal=causal
    )


@pytest.mark.parametrize(("causal", "mask"), [(False, False), (True, False), (False, True)])
def test_attention_captured_on_a_cpu_counts_as_on_paper(causal: bool, mask: bool) -> None:
    x = torch.randn(ROWS, QUERIES, HEADS * WIDTH)

    forward, backward = work_of(lambda x, w: attend(causal, mask, x, w), x, HEADS * WIDTH)

    assert forward == 4 * ROWS * HEADS * QUERIES**2 * WIDTH
    assert backward == 2 * forward


def test_a_convolution_counts_its_window_at_every_place() -> None:
    x = torch.randn(2, 3, 8, 8)

    forward, backward = work_of(lambda x, w: functional.conv2d(x, w, padding=1), x, 5, 3, 3, 3)

    assert forward == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert backward == 2 * forward
