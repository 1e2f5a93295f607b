"""What is wrong with an order that names messages or updates, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from piper.errors import Problem
from piper.ir.dag import Dag
from piper.ir.filters import Filter
from piper.ir.message_order import named_passes, without_operations
from piper.ir.nodes import Node, Transfer
from piper.ir.operations import TagIndex
from piper.ir.placement.residency import Residency
from piper.names import PASS, BucketId, NodeId, Operation

WHEN = {
    Operation.UPDATE: "parameters that are trained are updated",
    Operation.REDUCE: "gradients are reduced if `Replicate` gives the region several devices",
    Operation.GATHER: "parameters are gathered if `Replicate` shards them with zero=1, 2 or 3",
    Operation.SEND: "a value is sent if a region on other devices reads it",
    Operation.RECV: "a value is received if a region on other devices writes it",
    Operation.DISPATCH: "tokens are dispatched to regions of experts that `Shard` divides",
    Operation.COMBINE: "tokens are combined behind regions of experts that `Shard` divides",
}


def in_two_slots(name: NodeId, first: int, second: int) -> Problem:
    what = f"{name} is in both slots[{first}] and slots[{second}]"
    return Problem(what, "name each message and each update in one slot only")


def nothing_matches(dag: Dag, index: TagIndex, uses: TagIndex, wanted: Filter) -> Problem:
    what = f"{wanted} matches nothing"
    near = next(near_matches(index, uses, wanted), None)
    if near:
        return Problem(what, near)
    operation = next(one for one in Operation if one in named_passes(wanted))
    return Problem(what, f"{WHEN[operation]}; {existing(dag, index, without_operations(wanted))}")


def near_matches(index: TagIndex, uses: TagIndex, wanted: Filter) -> Iterator[str]:
    """What there is if one tag of a plain filter is another, or left out."""
    for key in reversed(wanted.keys) if type(wanted) is Filter else ():
        others = Filter(tuple(item for item in wanted.items if item[0] != key))
        if key != PASS and (index.select(others) or uses.select(others)):
            keys = (*others.keys, key)
            found = {*index.select(others), *uses.select(others)}
            groups = (*index.by(keys).items(), *uses.by(keys).items())
            have = dict.fromkeys(k[-1] for k, names in groups if found.intersection(names))
            values = [repr(value) for value in have if value is not None]
            yield (
                f"{others} has {key} {', '.join(values)}: use one of these"
                if values
                else (f"{others} has no {key}: leave it out")
            )


def existing(dag: Dag, index: TagIndex, tags: Filter) -> str:
    """The passes and operations that a filter without PASS has."""
    found = dict.fromkeys(str(node.phase) for node in dag.select(tags))
    names = set(index.select(tags))
    found |= dict.fromkeys(
        str(key[0]) for key, nodes in index.by((PASS,)).items() if names.intersection(nodes)
    )
    return f"{tags} has {', '.join(found) or 'nothing'}"


def too_few_buffers(here: NodeId, how: Residency, pinned: Iterable[BucketId]) -> Problem:
    held = ", ".join(pinned)
    what = f"an order wants {held} gathered early, so no gather buffer is left for {here}"
    more = how.gather_buffers + 1
    fix = f"write gather_buffers={more} in their `Replicate`, or let the order gather them later"
    return Problem(what, fix)


def gathered_elsewhere(dag: Dag, use: NodeId, other: NodeId) -> Problem:
    here, there = (devices_text(dag.nodes[name]) for name in (use, other))
    what = f"{other} on {there} cannot wait for the gather (zero=3) for {use} on {here}"
    return Problem(what, f"let it wait for {use}, which reads what is gathered")


def devices_text(node: Node) -> str:
    devices = [*node.source, *node.devices] if isinstance(node, Transfer) else node.devices or ()
    devices = list(dict.fromkeys(devices))
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
