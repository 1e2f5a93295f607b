"""Results of a region may share memory with each other or with an argument."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.capture.fx_nodes import insert
from piper.capture.graphs.joint import differentiate

aten = torch.ops.aten


def test_a_result_without_a_gradient_may_be_a_view_of_one_with_a_gradient() -> None:
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 6)
        made = insert(graph, x, aten.exp.default, x)
        rows = insert(graph, x, aten.view.default, made, [1, 4, 6])
        rows = insert(graph, x, aten.permute.default, rows, [1, 0, 2])
        graph.output((made, insert(graph, x, aten.view.default, rows, [4, 6])))
    chunk = SimpleNamespace(graph=fx.GraphModule({}, graph))

    joint = differentiate(chunk, mode, wants=(True,), given=(True, False))

    assert [tuple(node.meta["val"].shape) for node in joint.results] == [(4, 6), (4, 6)]


@pytest.mark.parametrize("others", [False, True])
def test_the_only_result_may_be_a_view_of_an_argument_and_have_no_gradient(others: bool) -> None:
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 6)
        rows = insert(graph, x, aten.view.default, x, [2, 2, 6])
        graph.output((insert(graph, x, aten.permute.default, rows, [1, 0, 2]),))
        arguments = [torch.empty(4, 6)] if others else None
    chunk = SimpleNamespace(graph=fx.GraphModule({}, graph))

    joint = differentiate(chunk, mode, (False,), (False,), arguments)

    assert [tuple(node.meta["val"].shape) for node in joint.results] == [(2, 2, 6)]


@pytest.mark.parametrize("given", [False, True])
def test_a_result_that_is_detached_twice_shares_memory_with_an_argument(given: bool) -> None:
    """Autograd does not call it a view."""
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 6)
        once = insert(graph, x, aten.detach.default, x)
        kept = insert(graph, x, aten.detach.default, once)
        graph.output((insert(graph, x, aten.exp.default, x), kept))
    chunk = SimpleNamespace(graph=fx.GraphModule({}, graph))

    joint = differentiate(chunk, mode, (given,), (given, False))

    assert [tuple(node.meta["val"].shape) for node in joint.results] == [(4, 6), (4, 6)]
