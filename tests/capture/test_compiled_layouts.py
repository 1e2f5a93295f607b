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

aten = torch.ops.aten


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products are padded as on a GPU, there by measurement."""
    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with config.patch(force_shape_pad=True):
        yield


@pytest.mark.usefixtures("padding")
def test_a_padded_product_is_given_without_its_padding() -> None:
    width, graph = 5, fx.Graph()
    with FakeTensorMode():
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["val"], y.meta["val"] = torch.empty(6, 4), torch.empty(4, width)
        product = insert(graph, y, aten.mm.default, x, y)
        turned = insert(graph, y, aten.permute.default, product, [1, 0])
        graph.output((product, turned, insert(graph, y, aten.exp.default, product)))
    made = compile_graph(fx.GraphModule({}, graph), {})
    given = torch.randn(6, 4), torch.randn(4, width)

    for _ in range(2):
        found = made(list(given))

        assert [one.stride() for one in found] == [(width, 1), (1, width), (width, 1)]
        torch.testing.assert_close(found[0], given[0] @ given[1])
        torch.testing.assert_close(found[1], (given[0] @ given[1]).T)
