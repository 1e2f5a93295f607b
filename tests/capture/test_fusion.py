"""What operators move if a compiler fuses them, against counts by hand."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.graphs import workspace
from piper.capture.graphs.flops import GraphWork
from piper.names import F

N = 8 * 8 * 4  # bytes of a matrix


def graph_of(function):
    x, w = torch.empty(8, 8), torch.empty(8, 8)
    return make_fx(function, tracing_mode="fake")(x, w)


def test_operators_between_products_become_one() -> None:
    module = graph_of(lambda x, w: (torch.relu((x @ w) * 2 + x)) @ w)

    assert (GraphWork(module).traffic, len(GraphWork(module).kernels)) == (7 * N, 5)
    assert GraphWork(module).fused == (3 * N, 3)  # reads the product and x, writes for the other


def test_what_lies_on_both_sides_of_a_product_is_not_fused() -> None:
    def residual(x, w):
        first = torch.relu(x)
        return torch.relu(first + first @ w)

    assert GraphWork(graph_of(residual)).fused == (2 * N + 3 * N, 3)


def test_what_several_read_is_written_once() -> None:
    def both(x, w):
        shared = torch.relu(x)
        return shared @ w, shared * 2

    assert GraphWork(graph_of(both)).fused == (3 * N, 2)  # x, and two results


def test_a_view_moves_nothing() -> None:
    module = graph_of(lambda x, w: torch.relu(x).t().sigmoid())

    assert GraphWork(module).fused == (2 * N, 1)


def test_looking_up_rows_does_not_read_the_table() -> None:
    look_up = make_fx(lambda table, rows: torch.embedding(table, rows), tracing_mode="fake")
    module = look_up(torch.empty(1000, 8), torch.zeros(3, dtype=torch.int64))

    assert GraphWork(module).traffic == 2 * 3 * 8 * 4 + 3 * 8


def test_results_inside_a_group_need_no_memory() -> None:
    module = graph_of(lambda x, w: x * 2 + x * 3)

    assert workspace.count(module, F) == 3 * N
    assert workspace.count(module, F, GraphWork(module).never_written) == N
