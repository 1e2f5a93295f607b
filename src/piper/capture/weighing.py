"""Means that skip labels: microbatches with fewer labels that count must weigh less."""

from collections.abc import Iterator

import torch
from torch import fx

from piper.capture.trace import Traced

aten = torch.ops.aten
MEAN = 1  # torch's number for reduction="mean"
LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)


def ignored_labels(traced: Traced) -> tuple[tuple[int, int], ...]:
    """Which batch tensors hold labels of a mean, and the label that is left out of it."""
    position = {node: index for index, node in enumerate(traced.batch)}
    found = (
        (position[source], ignored)
        for labels, ignored in means(traced.root.graph)
        for source in [origin(labels)]
        if source in position
    )
    return tuple(dict.fromkeys(found))


def means(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    for node in graph.nodes:
        if node.op == "call_function" and node.target in LOSSES:
            names = [argument.name for argument in node.target._schema.arguments]
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            if given.get("reduction", MEAN) == MEAN:
                yield given["target"], given.get("ignore_index", -100)


def origin(node: fx.Node) -> fx.Node:
    """What a chain of views and casts begins with."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node
