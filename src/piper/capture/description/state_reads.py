"""Which updated buffers a region computes with, and which it only keeps for later.

The running statistics of a batch norm in training mode are only kept: neither the loss nor any
gradient depends on them. Replicas may then have their own.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from piper.capture.description.region_graphs import Lowered
from piper.capture.torch_private import OpOverload, argument_types, result_names

STATISTICS = {"running_mean", "running_var"}  # arguments of torch's batch norms and their backwards
NEW_STATISTICS = {"running_mean_out", "running_var_out"}  # their results
BY_BATCH = {"training", "train", "update"}  # if true, statistics are those of the batch


def read_buffers(lowered: Lowered) -> tuple[str, ...]:
    """The names of updated buffers that an output or a gradient of the region depends on."""
    joint, chunk = lowered.joint, lowered.chunk
    new = set(lowered.updates.values())
    outputs = [node for k, node in enumerate(joint.results) if k not in new]
    wanted = [node for node in (*outputs, *joint.gradients) if node is not None]
    named = zip(lowered.updates, chunk.updated, strict=True)
    found = ((name, followers([joint.arguments[position]])) for position, name in named)
    return tuple(name for name, followed in found if not followed.isdisjoint(wanted))


def followers(sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on these."""
    found: set[fx.Node] = set()
    waiting = list(sources)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += dependents(node)
    return found


def dependents(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node that depend on its value."""
    for user in node.users:
        if normalises_by_batch(user) and node not in others(user):
            names = result_names(user.target)
            yield from (get for get in user.users if names[get.args[1]] in NEW_STATISTICS)
        else:
            yield user


def normalises_by_batch(node: fx.Node) -> bool:
    """Whether it is a batch norm in training mode, or the backward of one."""
    given = arguments(node)
    return given.keys() >= STATISTICS and any(given.get(name) is True for name in BY_BATCH)


def others(node: fx.Node) -> list[Any]:
    """Its arguments without running statistics."""
    return [value for name, value in arguments(node).items() if name not in STATISTICS]


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name."""
    if not isinstance(node.target, OpOverload):
        return {}
    named = zip(argument_types(node.target), node.args, strict=False)
    return {**dict(named), **node.kwargs}
