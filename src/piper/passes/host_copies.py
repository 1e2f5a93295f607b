"""Copy activations of offloaded regions to the host after their forward, and back before use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from piper.ir.dag import Dag
from piper.ir.host_copies import HostCopies, Offloaded
from piper.ir.naming import fetch_id, fetched, on_host, store_id
from piper.ir.nodes import Compute, Fetch, Node, Store
from piper.ir.values import Role, Value
from piper.names import F, NodeId, RegionId, ValueId
from piper.passes.gathers import lane_orders, rewired

KEPT = (Role.ACTIVATION, Role.SAVED)  # what waits from a forward to a backward


def offload_activations(dag: Dag) -> Dag:
    """The DAG with a store after each offloaded forward, and a fetch before each of its backwards.

    A value that would be fetched right after it was stored stays on the device.

    rewrite:
        F ... B                                              Offload(where(PP=0))
        -->
        F -> store ... fetch -> B
    """
    if not any(what is Offloaded.ACTIVATIONS for what, _ in dag.offloads):
        return dag
    copies = [LaneCopies(dag, order) for order in lane_orders(dag).values()]
    for lane in copies:
        lane.place()
    return with_copies(dag, copies)


@dataclass(frozen=True, slots=True)
class Use:
    """A backward that reads an offloaded value."""

    position: int
    how: HostCopies


@dataclass
class LaneCopies:
    """The copies of one lane, by the position of a pass in its order."""

    dag: Dag
    order: list[Compute]
    after: dict[int, list[Store]] = field(default_factory=dict)
    before: dict[int, list[Fetch]] = field(default_factory=dict)
    values: dict[ValueId, Value] = field(default_factory=dict)
    reads: dict[NodeId, dict[ValueId, ValueId]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.position = {node.id: k for k, node in enumerate(self.order)}
        self.forward: dict[tuple[RegionId, int | None], int] = {
            (node.region, node.microbatch): k
            for k, node in enumerate(self.order)
            if node.phase is F
        }

    def place(self) -> None:
        uses = {v: found for v, found in self.uses().items() if self.leaves(v, found)}
        busy: dict[HostCopies, dict[int, None]] = {}  # the passes that read copies, in order
        for use in sorted((u for found in uses.values() for u in found), key=lambda u: u.position):
            busy.setdefault(use.how, {})[use.position] = None
        passes = {how: list(positions) for how, positions in busy.items()}
        for value, found in uses.items():
            self.store(value, found)
            for number, use in enumerate(found):
                self.fetch(value, use, number, passes[use.how])

    def uses(self) -> dict[ValueId, list[Use]]:
        """What backwards of offloaded regions read of their forward, with their positions."""
        found: dict[ValueId, list[Use]] = {}
        for k, node in enumerate(self.order):
            how = self.dag.offloads.get((Offloaded.ACTIVATIONS, node.region))
            if how is not None and node.phase is not F:
                for total in node.reads:
                    if self.dag.values[total[0]].role in KEPT:
                        found.setdefault(total[0], []).append(Use(k, how))
        return found

    def last_other(self, value: ValueId, uses: list[Use]) -> int:
        """The last pass that reads or writes the device's own copy."""
        mine = {use.position for use in uses}
        readers = self.dag.consumers.get(value, ())
        others = {self.position[name] for name in readers if name in self.position} - mine
        first = self.order[uses[0].position]
        return max((self.forward[first.region, first.microbatch], *others))

    def leaves(self, value: ValueId, uses: list[Use]) -> bool:
        """Whether the device is without it during at least one pass."""
        freed = self.last_other(value, uses) + uses[0].how.buffers
        return min(use.position - use.how.ahead for use in uses) > freed

    def store(self, value: ValueId, uses: list[Use]) -> None:
        position, how = self.last_other(value, uses), uses[0].how
        node, there = self.order[uses[0].position], on_host(value)
        self.values[there] = replace(self.dag.values[value], host=True)
        self.after.setdefault(position, []).append(
            Store(
                id=store_id(value), tags=node.tags, reads=((value,),), writes=(there,),
                devices=node.devices or (), stream=how.stream, lag=how.buffers - 1,
            )
        )  # fmt: skip

    def fetch(self, value: ValueId, use: Use, number: int, passes: list[int]) -> None:
        """It starts ahead of its use, when the copies of enough passes before it are freed."""
        node, back = self.order[use.position], fetched(value, number)
        earlier = bisect_left(passes, use.position) - use.how.buffers
        free = passes[earlier] + 1 if earlier >= 0 else 0
        self.values[back] = self.dag.values[value]
        self.reads.setdefault(node.id, {})[value] = back
        self.before.setdefault(max(use.position - use.how.ahead, free), []).append(
            Fetch(
                id=fetch_id(back), tags=node.tags, reads=((on_host(value),),), writes=(back,),
                devices=node.devices or (), stream=use.how.stream,
            )
        )  # fmt: skip


def with_copies(dag: Dag, copies: list[LaneCopies]) -> Dag:
    """Insert the copies in the sequence, and let backwards read what was fetched."""
    nodes: list[Node] = []
    ahead: dict[NodeId, list[NodeId]] = {}
    behind: dict[NodeId, list[NodeId]] = {}
    values: dict[ValueId, Value] = {}
    for lane in copies:
        values |= lane.values
        nodes += (rewired(dag.nodes[name], changed) for name, changed in lane.reads.items())
        for table, found in ((lane.before, ahead), (lane.after, behind)):
            for position, made in table.items():
                nodes += made
                found.setdefault(lane.order[position].id, []).extend(node.id for node in made)
    wider = dag.with_values(values).with_nodes(nodes)
    return replace(wider, sequence=tuple(around(dag, ahead, behind)))


def around(
    dag: Dag, ahead: dict[NodeId, list[NodeId]], behind: dict[NodeId, list[NodeId]]
) -> Iterator[NodeId]:
    for name in dag.sequence:
        yield from ahead.get(name, ())
        yield name
        yield from behind.get(name, ())
