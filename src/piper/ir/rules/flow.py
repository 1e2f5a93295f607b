"""Rules about data and order: every read has one writer, and there are no cycles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from piper.errors import BUG, Problem
from piper.ir.cycles import DATA_FLOW, cycle
from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.naming import node_id
from piper.ir.nodes import Collective, Compute, Fetch, Node, Totals, Transfer, Update
from piper.ir.rules.neighbours import show
from piper.ir.values import PER_DEVICE, Role
from piper.names import BW, B, NodeId, Phase, ValueId

Pass = tuple[tuple[tuple[str, int], ...], int, Phase]  # of a region: its tags and its run


def every_read_has_a_writer(dag: Dag) -> Iterator[Problem]:
    given = [value for value in dag.consumers if value not in dag.producers]
    for value in given:
        known = dag.values.get(value)
        if known is None or not known.is_given:
            for node in dict.fromkeys(dag.consumers[value]):
                yield Problem(f"{node} reads {value}, which nothing writes", BUG)


def every_value_is_written_once(dag: Dag) -> Iterator[Problem]:
    if len(dag.producers) == sum(len(node.writes) for node in dag.nodes.values()):
        return
    written: dict[str, NodeId] = {}
    for node in dag.nodes.values():
        for value in node.writes:
            if value in written:
                yield Problem(f"{node.id} and {written[value]} both write {value}", BUG)
            written[value] = node.id


def nothing_waits_for_itself(dag: Dag) -> Iterator[Problem]:
    loop = cycle(dag)
    if loop:
        width = max(len(node) for node, _ in loop)
        rows = [
            f"\n    {node:{width}} -> {following:{width}}   {why}"
            for (node, why), (following, _) in zip(loop, [*loop[1:], loop[0]], strict=True)
        ]
        first = next((node for node, why in loop if why != DATA_FLOW), loop[0][0])
        fix = f"let the order put {first} after what it needs, or in the same slot"
        after_update = next((name for name, why in loop if is_ordered_update(dag, name, why)), None)
        yield Problem(
            "these wait for each other" + "".join(rows),
            NEXT_STEP if after_update else fix,
        )


NEXT_STEP = "if you mean passes of the next step, write STEP=1 in their filters, in the last slot"


def is_ordered_update(dag: Dag, name: NodeId, why: str) -> bool:
    """Whether an order puts something after an update, as if it were of the next step."""
    return why != DATA_FLOW and isinstance(dag.nodes[name], Update)


def every_gradient_is_counted_once(dag: Dag) -> Iterator[Problem]:
    """The gradient of each use of a trainable parameter reaches the optimizer exactly once."""
    for node in dag.computes:
        if node.phase in (B, BW):
            for value in node.writes:
                if dag.values[value].role is Role.WEIGHT_GRADIENT:
                    readers = [r for r in dag.consumers.get(value, ()) if adds(dag.nodes[r])]
                    if len(readers) != 1:
                        yield Problem(f"{value} is added up {len(readers)} times", BUG)


ADDING = (Update, Transfer, Collective)  # what adds gradients up


def adds(node: Node) -> bool:
    return isinstance(node, ADDING)


def every_read_is_local(dag: Dag) -> Iterator[Problem]:
    """After the transfers pass, a node reads only what is on its own devices."""
    place = {value: node for node in dag.nodes.values() for value in node.writes}
    for node in dag.nodes.values():
        here = node.source if isinstance(node, Transfer) else node.devices
        for value in chain.from_iterable(node.reads):
            maker = place.get(value)
            if maker is None or maker.devices is here or isinstance(node, Totals):
                continue  # nearly always
            if not is_at(maker, here):
                common = isinstance(node, Collective | Update) or is_per_device(dag, value)
                if not common or not set(here or ()) <= set(maker.devices or ()):
                    yield Problem(f"{node.id} reads {value}, which is not on {show(here)}", BUG)


def host_memory_is_read_by_copies_only(dag: Dag) -> Iterator[Problem]:
    """What is in host memory has to be fetched before anything else reads it."""
    for value, readers in dag.consumers.items() if dag.offloads else ():
        if dag.values[value].host:
            for name in dict.fromkeys(readers):
                if not isinstance(dag.nodes[name], Fetch):
                    yield Problem(f"{name} reads {value}, which is in host memory", BUG)


def is_at(maker: Node, here: tuple[int, ...] | None) -> bool:
    """Whether each replica has it where it reads it."""
    return maker.devices == here or isinstance(maker, Totals)


def is_per_device(dag: Dag, value: ValueId) -> bool:
    return dag.values[value].role in PER_DEVICE


def orders_name_all_microbatches_or_none(dag: Dag) -> Iterator[Problem]:
    """An order that leaves out one microbatch of a pass is probably a mistake.

    Microbatches of different sizes have regions of their own, with the same tags.
    """
    passes = passes_of(dag)
    named: dict[Pass, set[NodeId]] = {}
    makers: dict[Pass, set[Maker]] = {}
    orders = [one for one in dag.precedences if one.maker.is_order and not one.partial]
    for order in orders:
        for name in (*order.before, *order.after):
            one = passes[name]
            named.setdefault(one, set()).add(name)
            makers.setdefault(one, set()).add(order.maker)
    each: dict[Pass, list[Compute]] = {}
    for node in dag.computes if named else ():
        if (one := passes[node.id]) in named:
            each.setdefault(one, []).append(node)
    for one, nodes in each.items():
        region = min((node.region for node in nodes), key=len)
        left_out = [node for node in nodes if node.id not in named[one]]
        if left_out:
            what, maker = f"{region} {one[-1]}", min(makers[one], key=lambda m: m.directive)
            others = listed([node_id(region, node.phase, node.microbatch) for node in left_out])
            yield Problem(
                f"the {maker} names {what} for {len(named[one])} of its microbatches, but not "
                f"{others}",
                f"add slots for {others}, or leave {what} out of the order",
            )


def listed(nodes: Sequence[NodeId]) -> str:
    """
    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"])
    ('a, b', 'a, b and 2 more')
    """
    more = f" and {len(nodes) - 2} more" if len(nodes) > 3 else ""
    return ", ".join(nodes[: 2 if more else 3]) + more


def passes_of(dag: Dag) -> dict[NodeId, Pass]:
    regions = {one.id: (one.tags, one.run) for one in dag.model.regions}
    return {node.id: (*regions[node.region], node.phase) for node in dag.computes}
