"""Messages are explained by the operators on both sides."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from piper.capture.graphs.division.notes import shown


def test_one_of_several_results_has_the_name_of_what_computed_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(torch.ops.aten.split.Tensor, (x, 2))
    first = graph.call_function(getitem, (parts, 0))
    bare = graph.call_function(torch.ops.aten.relu.default, (first,))

    assert shown(first) == "split" == shown(parts)
    assert shown(bare) == "relu"
