"""Orders that change nothing, because what they ask for happens anyway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.nodes import Precedence
from piper.names import NodeId

FORCED = "the flow of data alone gives what is asked for"
APART = "no device has two of the passes that are ordered"
MOST = 2_000  # passes that are named: above that, it is not worth the time


def implied_orders(dag: Dag, orders: Sequence[Maker], others: Sequence[Maker] = ()) -> str:
    """One line of each reason. Empty if every order changes something.

    `others` name messages, updates or passes of the next step. Those that needed no edge are
    implied by dataflow, also between devices.
    """
    made = {one.maker for one in dag.precedences}
    unseen = [one for one in others if one not in made]
    return "\n".join([*lines(dag, orders), *line(FORCED, unseen)])


def lines(dag: Dag, orders: Sequence[Maker]) -> Iterator[str]:
    asked: dict[Maker, list[Precedence]] = {order: [] for order in orders}
    for one in dag.precedences:
        if one.maker in asked:
            asked[one.maker].append(one)
    named = dict.fromkeys(n for found in asked.values() for one in found for n in one.before)
    if len(named) > MOST:
        return
    bits = {node: 1 << k for k, node in enumerate(named)}
    yield from line(APART, (o for o in asked if not asked[o]))
    needs = ancestors(dag, bits)
    yield from line(
        FORCED,
        (
            o
            for o, found in asked.items()
            if found and all(is_implied(p, bits, needs) for p in found)
        ),
    )


def line(reason: str, orders: Iterable[Maker]) -> Iterator[str]:
    found = list(orders)
    if found:
        numbers = ", ".join(str(one.directive) for one in found)
        change = "order changes" if len(found) == 1 else "orders change"
        which = "directive" if len(found) == 1 else "directives"
        yield f"{which} {numbers} of {found[0].of}: the {change} nothing, as {reason}"


def is_implied(asked: Precedence, bits: dict[NodeId, int], needs: dict[NodeId, int]) -> bool:
    wanted = sum(bits[node] for node in asked.before)
    return all(needs[after] & wanted == wanted for after in asked.after)


def ancestors(dag: Dag, bits: dict[NodeId, int]) -> dict[NodeId, int]:
    """For each node, the bits of those that it needs, directly or not."""
    graph = dag.data_flow
    indegree, found = list(graph.indegree), [0] * len(graph.ids)
    ready = [k for k, degree in enumerate(indegree) if not degree]
    for k in ready:  # grows
        mine = found[k] | bits.get(graph.ids[k], 0)
        for after in graph.successors[k]:
            found[after] |= mine
            indegree[after] -= 1
            if not indegree[after]:
                ready.append(after)
    return dict(zip(graph.ids, found, strict=True))
