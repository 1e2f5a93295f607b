"""How far the memory of a device is below its peak, pass by pass, before anything is gathered.

An estimate from the sizes of values: what passes keep for later passes, gradients that are added up
until they are reduced, and what a pass needs while it runs. The memory of a plan is computed later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.ir.values import Role, Value
from piper.names import ValueId

Held = tuple[int, int, int]  # bytes, the first and the last pass
Positions = dict[ValueId, tuple[int, int]]  # the first and the last pass that has a value


def spare_memory(dag: Dag, order: Sequence[Compute]) -> list[int]:
    """Bytes that each pass of a lane leaves free below the peak of all of them."""
    change = [0] * (len(order) + 1)
    for value, (first, last) in lifetimes(dag, order).items():
        change[first] += dag.values[value].nbytes
        change[last + 1] -= dag.values[value].nbytes
    for size, first, last in (*added_up(dag, order), *in_flight(dag, order)):
        change[first] += size
        change[last + 1] -= size
    held = list(accumulate(change[:-1]))
    needed = [now + while_running(dag, node) for now, node in zip(held, order, strict=True)]
    return [max(needed, default=0) - one for one in needed]


def lifetimes(dag: Dag, order: Sequence[Compute]) -> Positions:
    """From the pass after the one that makes a value to the last that reads it.

    What a pass makes is part of what it needs while it runs.
    """
    made = {value: k for k, node in enumerate(order) for value in node.writes}
    found: Positions = {}
    for k, node in enumerate(order):
        for value in (value for total in node.reads for value in total):
            if not dag.values[value].is_given and not is_weights(dag.values[value]):
                first, _ = found.get(value, (made.get(value, k - 1) + 1, k))
                found[value] = first, k
    return found


def is_weights(value: Value) -> bool:
    return value.role is Role.WHOLE_WEIGHTS


def in_flight(dag: Dag, order: Sequence[Compute]) -> list[Held]:
    """Gradients that are reduced as each microbatch produces them. They are on their way while the
    next pass runs; after the last pass of a microbatch, for some forwards more."""
    made = [(k, gradient_bytes(dag, node)) for k, node in enumerate(order)]
    made = [(k, size) for k, size in made if size]
    nexts = [*(k for k, _ in made[1:]), len(order)]
    pairs = zip(made, nexts, strict=False)
    return [(size, k + 1, max(k + 1, then - 2)) for (k, size), then in pairs if k + 1 < len(order)]


def gradient_bytes(dag: Dag, node: Compute) -> int:
    """Of what a pass makes and is reduced at once."""
    found = (dag.values[value] for value in node.writes)
    grads = [value for value in found if value.role is Role.WEIGHT_GRADIENT and value.bucket]
    hows = [dag.residencies.get(value.bucket) for value in grads if value.bucket]
    pairs = zip(grads, hows, strict=True)
    return sum(value.nbytes for value, how in pairs if how and not how.once)


def added_up(dag: Dag, order: Sequence[Compute]) -> list[Held]:
    """Gradients of several microbatches, from the pass after the first part to the last part."""
    parts: dict[object, list[tuple[int, ValueId]]] = defaultdict(list)
    for k, node in enumerate(order):
        for value in node.writes:
            known = dag.values[value]
            if known.role is Role.WEIGHT_GRADIENT:
                parts[known.bucket].append((k, value))
    several = [some for some in parts.values() if len(some) > 1]
    return [(summed_bytes(dag, some[0][1]), some[0][0] + 1, some[-1][0]) for some in several]


def summed_bytes(dag: Dag, gradient: ValueId) -> int:
    """Bytes of a sum of gradients: whole ones, or a shard if each part is reduced."""
    known = dag.values[gradient]
    how = dag.residencies.get(known.bucket) if known.bucket else None
    return known.nbytes if how is None or how.once else known.nbytes // how.ways


def while_running(dag: Dag, node: Compute) -> int:
    """A pass makes its results besides what it works with."""
    region = dag.model.by_id[node.region]
    results = sum(dag.values[value].nbytes for value in node.writes)
    cut = dag.shardings.get(region.id)
    return max(region.allocates(node.phase, cut.ways if cut else 1), results)
