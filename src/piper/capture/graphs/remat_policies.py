"""Which results of the forward a recomputed region keeps."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from piper.capture.fx_nodes import closure
from piper.capture.graphs.flops import bytes_of, flops_of
from piper.capture.graphs.joint import Joint
from piper.capture.graphs.partition import Partition
from piper.capture.kernels import rms_norm
from piper.capture.kernels.unrepeatable import MAY_DIFFER, may_differ
from piper.capture.torch_private import OpOverload, is_view
from piper.ir.partition.knapsack import Option, best_options
from piper.ir.remat_policy import ATTENTION, COSTLY, MATMULS, TOPK, RematPolicy

aten = torch.ops.aten

INTENSITY = 200.0  # FLOPs in the time of moving a byte, about as on an H200
SMALL = 1 / 16  # of the largest result that is kept: less is not worth an operator
COPIES = frozenset({aten._to_copy.default})  # elementwise, though torch does not say so
NORMS = frozenset({aten.native_layer_norm.default, aten._fused_rms_norm.default, rms_norm.FORWARD})


def nodes_to_keep(joint: Joint, cut: Partition, policy: RematPolicy) -> frozenset[str]:
    """Names of nodes whose results are kept. `cut`: what is kept without recomputing."""
    if isinstance(policy, float):
        return frozenset(node.name for node in dearest(joint, cut.saved, policy))
    chosen = {node for node in joint.module.graph.nodes if kind_of(node) in policy}
    more = costly(joint, cut) if COSTLY in policy else ()
    return frozenset(node.name for node in (*chosen, *picks(chosen), *more))


def costly(joint: Joint, cut: Partition) -> set[fx.Node]:
    """What is saved, except what elementwise operators and norms make of something that is there.

    Repeating those takes one operator each, and nothing else has to be kept for it. Of a copy in a
    wider type, its narrower source is kept.
    """
    there = {*cut.saved, *(joint.arguments[position] for position in cut.backward_arguments)}
    least = SMALL * max(map(bytes_of, cut.saved), default=0)
    read = {  # others may hold results
        node: cheaply_from(node)
        for node in cut.saved
        if bytes_of(node) >= least and node not in joint.results
    }
    repeated = {node for node, some in read.items() if some and all_there(some, there)}
    wide = widened(read.keys() - repeated, there)
    return {*cut.saved, *wide} - {*repeated, *chain.from_iterable(wide.values())}


def cheaply_from(node: fx.Node) -> list[fx.Node]:
    """What an operator reads that gives it again and mostly moves bytes. Empty if none does."""
    if is_elementwise(node):
        return node.all_input_nodes
    maker = node.args[0] if node.target is operator.getitem else None
    is_norm = isinstance(maker, fx.Node) and maker.target in NORMS and node.args[1] == 0
    return maker.all_input_nodes if isinstance(maker, fx.Node) and is_norm else []


def widened(nodes: Iterable[fx.Node], there: Collection[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Those that are copies, by what they are copies of, where that is not there and smaller."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        source = viewed(node.all_input_nodes[0]) if node.target in COPIES else node
        if source.op == "call_function" and source not in there:
            groups.setdefault(source, []).append(node)
    return {
        source: copies
        for source, copies in groups.items()
        if bytes_of(source) < sum(map(bytes_of, copies))
    }


def viewed(node: fx.Node) -> fx.Node:
    """What a view shows."""
    return viewed(node.all_input_nodes[0]) if is_view(node) else node


def is_elementwise(node: fx.Node) -> bool:
    """Copies, too: they are for another type or layout."""
    return node.target in COPIES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def all_there(nodes: Iterable[fx.Node], known: Collection[fx.Node]) -> bool:
    """Whether they are known, or views of something known."""
    return all(
        node in known or (is_view(node) and all_there(node.all_input_nodes, known))
        for node in nodes
    )


def kind_of(node: fx.Node) -> str | None:
    """The kind of a node's results, by which a user names them."""
    if not isinstance(node.target, OpOverload):
        return None
    packet = node.target.overloadpacket
    if "scaled_dot_product" in str(packet) or "block_attention" in str(packet):
        return ATTENTION
    if packet in flop_registry:
        return MATMULS
    return TOPK if packet in MAY_DIFFER else None


def dearest(joint: Joint, saved: Sequence[fx.Node], share: float) -> list[fx.Node]:
    """The saved nodes that take longest to recompute, in at most a share of their bytes.

    The backward needs every saved node, so a node that is not kept is recomputed from the saved
    nodes before it, kept or recomputed themselves. The time of a choice is therefore the sum over
    what is not kept. Nodes that two such recomputations have in common count twice.
    """
    groups, stop = producers(saved), {*joint.arguments, *joint.tangents, *saved}
    options: list[list[Option]] = []
    for maker, nodes in groups.items():
        kept = (sum(map(bytes_of, nodes)), price(closure([maker], stop - {maker, *nodes})))
        options.append([kept] if is_kept_anyway(joint, maker) else [kept, (0, 0.0)])
    limit = int(share * sum(row[0][0] for row in options))
    chosen = best_options(options, limit) or [1] * len(options)
    rows = zip(groups.values(), chosen, strict=True)
    return [node for nodes, choice in rows if choice == 0 for node in nodes]


def is_kept_anyway(joint: Joint, maker: fx.Node) -> bool:
    """Old values of buffers, and what may differ when it is repeated."""
    return maker.op != "call_function" or may_differ(joint.module, maker)


def producers(saved: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Saved nodes by the operator that makes them: it makes all its results at once."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in saved:
        maker = node.args[0] if node.target is operator.getitem else node
        assert isinstance(maker, fx.Node)
        groups.setdefault(maker, []).append(node)
    return groups


def price(nodes: Iterable[fx.Node]) -> float:
    """The time of running these nodes, in FLOPs."""
    return sum(
        max(flops_of(node), INTENSITY * bytes_of(node)) for node in nodes if not is_view(node)
    )


def picks(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [user for node in nodes for user in node.users if user.target is operator.getitem]
