"""Which node of a joint graph runs in which phase, and what is kept in between.

F and B together do the work of the joint graph exactly once, and so do F, BI and BW together.
Exceptions are views and a few other nodes that cost less to recompute than to keep, and forward
nodes that are recomputed to save memory.
"""

import operator
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from piper.capture.fx_nodes import closure, in_order, is_symbolic
from piper.capture.graphs.joint import Joint
from piper.capture.graphs.recomputation import checkpointed, repeatable
from piper.capture.torch_private import OpOverload, is_backward, is_view

aten = torch.ops.aten


@dataclass
class Partition:
    """Nodes of the joint graph, in graph order. Arguments and tangents are positions."""

    saved: list[fx.Node]  # F -> B
    carry: list[fx.Node]  # BI -> BW
    backward_arguments: list[int]  # that B reads
    weight_arguments: list[int]  # that BW reads
    weight_tangents: list[int]
    recomputed: set[fx.Node]  # forward nodes that the backward recomputes to save memory


def partition(
    joint: Joint,
    weights: int,
    volatile: Iterable[fx.Node],
    keep: Container[str] | None = None,
) -> Partition:
    """Cut between forward and backward, then between BI and BW.

    The first `weights` arguments are parameters. `volatile` arguments change after the forward
    pass: the backward must not read them again, so they are saved. With `keep`, hardly anything
    else is but the results of the nodes that it names: the backward recomputes the forward, and BI
    carries to BW what both need.
    """
    recompute = keep is not None
    arguments = set(joint.arguments).difference(volatile)
    tangents = set(joint.tangents)
    backward = _backward_nodes(joint)
    if keep is None:
        recomputed = checkpointed(joint, backward)
    else:
        recomputed = {node for node in repeatable(joint, backward) if node.name not in keep}
    cheap = _cheap_nodes(joint, weights)
    again = cheap | recomputed
    twice = cheap if recompute else again  # by BI and by BW, each for itself
    kept = _frontier(
        [gradient for gradient in joint.gradients if gradient is not None],
        inside=lambda node: node in backward or node in tangents or node in again,
    )
    saved = in_order(joint.module.graph, kept - arguments)
    available = set(saved) | arguments | tangents
    inputs = [node for node in joint.gradients[weights:] if node is not None]
    parameters = [node for node in joint.gradients[:weights] if node is not None]
    early = _with_picks(closure(inputs, available))
    if recompute and inputs:  # all at once in BI: the carry is then no larger than without
        early |= recomputed
    late = _frontier(
        parameters,
        inside=lambda node: node not in available and (node not in early or node in twice),
    )
    return Partition(
        saved=saved,
        carry=in_order(joint.module.graph, late - arguments - tangents),
        backward_arguments=_positions(joint.arguments, kept & arguments),
        weight_arguments=_positions(joint.arguments, late & arguments),
        weight_tangents=_positions(joint.tangents, late),
        recomputed=recomputed,
    )


def _backward_nodes(joint: Joint) -> set[fx.Node]:
    """Nodes that autograd made, and all nodes that depend on the tangents."""
    nodes = set(joint.tangents)
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and (
            is_backward(node) or not nodes.isdisjoint(node.all_input_nodes)
        ):
            nodes.add(node)
    return nodes.difference(joint.tangents)


def _frontier(roots: list[fx.Node], inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The first nodes outside of `inside` on a walk from `roots` towards the arguments."""
    seen: set[fx.Node] = set()
    frontier: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if inside(node):
            waiting += node.all_input_nodes
        else:
            frontier.add(node)
    return frontier


def _with_picks(nodes: set[fx.Node]) -> set[fx.Node]:
    """Add the getitem nodes: an operation computes all its results at once."""
    picks = {user for node in nodes for user in node.users if user.target is operator.getitem}
    return nodes | picks


def _cheap_nodes(joint: Joint, weights: int) -> set[fx.Node]:
    """Nodes that are cheaper to recompute than to keep: views, constants, sizes, weight casts."""
    cheap: set[fx.Node] = set()
    of_weights = set(joint.arguments[:weights])
    for node in joint.module.graph.nodes:
        view = is_view(node)
        if not of_weights.isdisjoint(node.all_input_nodes) and (
            view or node.target is aten._to_copy.default
        ):
            of_weights.add(node)
            cheap.add(node)
        elif view or _is_constant(node) or _is_arithmetic(node):
            cheap.add(node)
    return cheap


def _is_constant(node: fx.Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)


def _is_arithmetic(node: fx.Node) -> bool:
    """Python operations on sizes. The size of a tensor is not: the tensor would have to be kept."""
    return is_symbolic(node) and not isinstance(node.target, OpOverload)


def _positions(nodes: list[fx.Node], chosen: set[fx.Node]) -> list[int]:
    return [position for position, node in enumerate(nodes) if node in chosen]
