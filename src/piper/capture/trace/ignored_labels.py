"""Losses that ignore labels: a microbatch with fewer labels that count must weigh less."""

from collections.abc import Iterator

import torch
from torch import fx

from piper.capture.torch_private import argument_names, is_view
from piper.capture.trace.forward import Traced

aten = torch.ops.aten
MEAN = 1  # torch's number for reduction="mean"
KEEPING = (
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.pad.default,
    aten.contiguous.default, aten.clone.default, aten.reshape.default, aten.flatten.using_ints,
    aten.constant_pad_nd.default, aten.view.default, aten.slice.Tensor, aten.alias.default,
    aten.detach.default,
)  # fmt: skip
LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)


Ignored = tuple[int | None, int | None]  # batch tensor, label; None if unknown


def ignored_labels(traced: Traced) -> tuple[Ignored, ...]:
    """Which batch tensors hold the labels of a mean, and which label it ignores."""
    position = {node: index for index, node in enumerate(traced.batch)}
    found = (
        (position.get(origin(labels)), None if weighted else ignored)
        for labels, ignored, weighted in means(traced.root.graph)
    )
    return tuple(dict.fromkeys(found))


def means(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, bool]]:
    """The labels of each mean, the label it ignores, and whether it weighs classes."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in LOSSES:
            names = argument_names(node)
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            if given.get("reduction", MEAN) == MEAN:
                weighted = given.get("weight") is not None
                yield given["target"], given.get("ignore_index", -100), weighted


def origin(node: fx.Node) -> fx.Node:
    """Where a chain of views, casts and paddings starts: they keep labels or add ignored ones."""
    while node.all_input_nodes and (is_view(node) or node.target in KEEPING):
        node = node.all_input_nodes[0]
    return node
