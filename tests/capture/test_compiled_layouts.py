"""Compiled graphs give their results in the layout that the graphs after them expect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.capture.fx_nodes import insert
from piper.capture.inductor_private import compile_graph
from piper.capture.kernels.joining import joined

aten = torch.ops.aten


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products are padded as on a GPU, there by measurement."""
    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with config.patch(force_shape_pad=True):
        yield


def products() -> fx.GraphModule:
    graph = fx.Graph()
    with FakeTensorMode():
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.empty(6, 4), torch.empty(4, 5)
        product = insert(graph, y, aten.mm.default, x, y)
        turned = insert(graph, y, aten.permute.default, product, [1, 0])
        graph.output((product, turned, insert(graph, y, aten.exp.default, product)))
    return fx.GraphModule({}, graph)


@pytest.mark.usefixtures("padding")
@pytest.mark.parametrize("is_joined", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_padded_product_is_given_without_its_padding(is_joined: bool) -> None:
    every = tuple((0, k) for k in range(3))
    module = joined([products()], ((0, 1),), every, True) if is_joined else products()
    made, given = compile_graph(module, {}), (torch.randn(6, 4), torch.randn(4, 5))

    for _ in range(2):
        found = made(list(given))

        assert [one.stride() for one in found] == [(5, 1), (1, 5), (5, 1)]
        torch.testing.assert_close(found[0], given[0] @ given[1])
        torch.testing.assert_close(found[1], (given[0] @ given[1]).T)
