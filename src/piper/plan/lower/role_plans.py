"""What the plan of a role leaves to its devices, read off the DAG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from piper.ir.by_device.local_dags import views
from piper.ir.by_device.roles import Groups, Roles
from piper.ir.dag import Dag
from piper.ir.naming import sum_buffer
from piper.ir.nodes import Collective, Kind, Totals
from piper.ir.nodes import Exchange as ExchangeNode
from piper.ir.nodes import Redistribute as RedistributeNode
from piper.names import BucketId, Device, NodeId, ValueId
from piper.plan.binding import Grouping, JobGroups, Meeting, RolePlan, Turn, bind
from piper.plan.instructions import Plan, State, Total
from piper.plan.lower.counted_once import of_member


def role_plans(
    dag: Dag, plans: Sequence[Plan], roles: Roles
) -> tuple[JobGroups, dict[Device, RolePlan]]:
    """The plan of each role, by its first device, ready to be bound to any of its devices."""
    every = views(dag, tuple(plan.device for plan in plans))
    reading = Reading(dag, {device: view.dag for view in every for device in view.devices})
    found = {plan.device: reading.role_plan(plan) for plan in plans}
    job = JobGroups(roles, tuple(reading.groupings))
    for role in found.values():
        assert bind(role, job, role.plan.device) == role.plan
    return job, found


@dataclass
class Reading:
    """The groupings that were met so far."""

    dag: Dag
    seen: Mapping[Device, Dag]  # the DAG as each device sees it
    groupings: dict[Groups, int] = field(default_factory=dict)
    # By identity: hashing long lists would take too long. They are kept, so that ids stay theirs.
    known: dict[int, tuple[Groups, int]] = field(default_factory=dict)

    def role_plan(self, plan: Plan) -> RolePlan:
        met = (one for one in plan.instructions if isinstance(one, Meeting))
        return RolePlan(
            plan=plan,
            meetings=tuple(self.of_node(plan.device, one.node) for one in met),
            holdings=tuple(map(self.holding, plan.states)),
            turns=tuple(self.turns(plan)),
        )

    def number(self, groups: Groups) -> int:
        if id(groups) not in self.known:
            number = self.groupings.setdefault(groups, len(self.groupings))
            self.known[id(groups)] = groups, number
        return self.known[id(groups)][1]

    def of_node(self, device: Device, name: str) -> int:
        node = self.seen[device].nodes[NodeId(name)]
        assert isinstance(node, Collective | ExchangeNode | RedistributeNode)
        return self.number(node.groups)

    def holding(self, state: State) -> tuple[Grouping, Grouping]:
        """The groupings that say which shard, and which share of it, a device holds."""
        bucket = BucketId(state.bucket)
        cut = self.dag.pieces(bucket)
        shards = self.number(self.dag.residencies[bucket].groups) if state.ways > 1 else None
        return shards, self.number(cut.groups) if cut else None

    def turns(self, plan: Plan) -> Iterator[Turn]:
        """The gradients of the norm that a device holds, also those that others count."""
        made: dict[str, int] = {}
        for one in plan.instructions:
            if isinstance(one, Total):
                dag = self.seen[plan.device]
                yield from self.held(plan.device, dag, dag.nodes[NodeId(one.node)], made)
            made.update(dict.fromkeys(one.defines, 0))

    def held(
        self, device: Device, dag: Dag, node: object, made: Mapping[str, int]
    ) -> Iterator[Turn]:
        """Of what is whole on devices that divide regions, one of these roles counts it."""
        assert isinstance(node, Totals)
        for number, total in enumerate(node.reads[1:]):
            whole = sum_buffer(total[0])
            buffer = whole if len(total) > 1 and whole in made else total[0]
            if buffer in made and of_member(dag, device, total[0], number):
                yield buffer, self.reduced_by(dag, total[0]), number

    def reduced_by(self, dag: Dag, value: ValueId) -> Grouping:
        """The groups that all hold this sum; None if every device has a part of its own."""
        maker = dag.nodes[dag.producers[value]]
        is_whole = isinstance(maker, Collective) and maker.kind is Kind.ALL_REDUCE
        return self.number(maker.groups) if is_whole else None  # type: ignore[union-attr]
