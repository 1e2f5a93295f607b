"""Fetch the optimizer state of offloaded parameters before their update, and store it after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from piper.ir.dag import Dag
from piper.ir.host_copies import HostCopies, Offloaded
from piper.ir.naming import fetch_id, fetched, optimizer_state, store_id, updated, weights
from piper.ir.nodes import Compute, Fetch, Node, Store, Update
from piper.ir.values import Role, Value
from piper.names import BucketId, NodeId, ValueId
from piper.passes.host_copies import around

MOMENTS = 2  # tensors of state for each parameter, as Adam has


def offload_optimizer(dag: Dag) -> Dag:
    """The DAG with optimizer state in host memory, which updates fetch and store.

    rewrite:
        B -> Update                             Offload(where(PP=0), "optimizer")
        -->
        B, fetch -> Update -> store
    """
    if not any(what is Offloaded.OPTIMIZER for what, _ in dag.offloads):
        return dag
    made = [LaneStates(dag, order) for order in work_orders(dag)]
    for lane in made:
        lane.place()
    nodes = [node for lane in made for node in lane.nodes]
    values = {name: value for lane in made for name, value in lane.values.items()}
    ahead = {name: nodes for lane in made for name, nodes in lane.ahead.items()}
    behind = {name: nodes for lane in made for name, nodes in lane.behind.items()}
    wider = dag.with_values(values).with_nodes(nodes)
    return replace(wider, sequence=tuple(around(dag, ahead, behind)))


def work_orders(dag: Dag) -> list[list[Compute | Update]]:
    """The passes and updates of each lane, in order."""
    table, found = dag.lanes, dict[int, list[Compute | Update]]()
    for node in map(dag.nodes.__getitem__, dag.sequence):
        if isinstance(node, Compute | Update) and node.devices:
            found.setdefault(table[node.devices], []).append(node)
    return list(found.values())


@dataclass
class LaneStates:
    """The copies of optimizer state of one lane."""

    dag: Dag
    order: list[Compute | Update]
    nodes: list[Node] = field(default_factory=list)
    values: dict[ValueId, Value] = field(default_factory=dict)
    ahead: dict[NodeId, list[NodeId]] = field(default_factory=dict)
    behind: dict[NodeId, list[NodeId]] = field(default_factory=dict)

    def place(self) -> None:
        taken: dict[HostCopies, list[int]] = {}  # the positions of updates so far
        for position, node, how in self.updates():
            before = taken.setdefault(how, [])
            free = before[-how.buffers] + 1 if len(before) >= how.buffers else 0
            self.copy(node, how, max(position - how.ahead, free))
            before.append(position)

    def updates(self) -> Iterator[tuple[int, Update, HostCopies]]:
        for position, node in enumerate(self.order):
            if isinstance(node, Update):
                user = self.dag.model.first_uses[node.bucket]
                how = self.dag.offloads.get((Offloaded.OPTIMIZER, user))
                if how is not None:
                    yield position, node, how

    def copy(self, node: Update, how: HostCopies, start: int) -> None:
        there = optimizer_state(node.bucket)
        here = fetched(there, 0)
        old, new = state_value(self.dag, node.bucket), updated(here)
        changed = replace(old, role=Role.NEW_OPTIMIZER)
        self.values |= {
            there: replace(old, host=True),
            here: old,
            new: replace(changed, state=here),
            updated(there): replace(changed, host=True, state=there),
        }
        devices, stream = node.devices or (), how.stream
        fetch = Fetch(
            id=fetch_id(here), reads=((there,),), writes=(here,), devices=devices, stream=stream
        )
        store = Store(
            id=store_id(new), reads=((new,),), writes=(updated(there),), devices=devices,
            stream=stream, lag=how.buffers - 1,
        )  # fmt: skip
        reads, writes = (*node.reads, (here,)), (*node.writes, new)
        self.nodes += [fetch, replace(node, reads=reads, writes=writes), store]
        self.ahead.setdefault(self.order[start].id, []).append(fetch.id)
        self.behind.setdefault(node.id, []).append(store.id)


def state_value(dag: Dag, bucket: BucketId) -> Value:
    """Optimizer state on a device, as large as that of Adam, and masters."""
    known, held = dag.model.buckets[bucket], dag.values[weights(bucket)].specs
    specs = (*known.updated(held) * MOMENTS, *known.masters(held))
    return Value(specs, Role.OPTIMIZER, bundle=True, bucket=bucket)
