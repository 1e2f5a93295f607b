"""What the axes of a job send between nodes, and whether another mesh would send less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from piper.names import Device
from piper.plan.analyse.traffic import split_by_node
from piper.plan.binding import JobGroups, Meeting, RolePlan
from piper.plan.instructions import Exchange, Redistribute, Send
from piper.view.reports.footprint import size_text

Node = Callable[[Device], int]
Numbering = Mapping[Device, Device]  # the number that a device would have
WORTH = 0.9  # another mesh must send less than this share of what is sent now


@dataclass
class AxisTraffic:
    """The messages of one device per role, by those that they go to."""

    job: JobGroups
    roles: Sequence[RolePlan]
    sends: Counter[tuple[Device, Device]] = field(default_factory=Counter)  # role, peer -> bytes
    met: dict[tuple[Device, int], list[Meeting]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role in self.roles:
            here, groupings = role.plan.device, iter(role.meetings)
            for one in role.plan.instructions:
                if isinstance(one, Send):
                    self.sends[here, one.peer] += one.sent
                elif isinstance(one, Meeting):
                    self.met.setdefault((here, next(groupings)), []).append(one)

    @property
    def sent(self) -> Counter[str]:
        """Bytes that all devices send in a step, by axis."""
        found: Counter[str] = Counter()
        for size in self.sends.values():
            found["pp"] += size
        for one in (one for several in self.met.values() for one in several):
            found[axis_of(one)] += one.sent
        return Counter({axis: size * len(self.job.roles.rows) for axis, size in found.items()})

    def between(self, node: Node) -> Counter[str]:
        """Bytes that leave the nodes of all devices in a step, by axis."""
        found: Counter[str] = Counter()
        for row in self.job.roles.rows:
            own = dict(zip(self.job.roles.rows[0], row, strict=True))
            for (role, peer), size in self.sends.items():
                found["pp"] += size if node(own[role]) != node(own[peer]) else 0
        for (role, grouping), several in self.met.items():
            for nodes, members in self.spread(role, grouping, node).items():
                for one in several:
                    found[axis_of(one)] += round(split_by_node(one, nodes)[1] * members)
        return found

    def spread(self, role: Device, grouping: int, node: Node) -> Counter[int]:
        """How many devices of a role are in groups over one node, over two, and so on."""
        mine, found = set(self.job.roles.devices(role)), Counter[int]()
        for group in self.job.groupings[grouping]:
            here = sum(device in mine for device in group)
            if here:
                found[len({node(device) for device in group})] += here
        return found


def axis_of(one: Meeting) -> str:
    if isinstance(one, Redistribute):
        return "tp"
    return "ep" if isinstance(one, Exchange) else "dp"


def advice(job: JobGroups, roles: Sequence[RolePlan], node: Node) -> str | None:
    """A warning if the axis that sends most crosses nodes, and another mesh sends less."""
    traffic = AxisTraffic(job, roles)
    now, most = traffic.between(node), traffic.sent.most_common(1)
    if not most or not now[most[0][0]]:
        return None
    best, mesh = min(
        (traffic.between(renumbered(node, numbers)).total(), mesh)
        for mesh, numbers in meshes(traffic)
    )
    if best > WORTH * now.total():
        return None
    axis, size = most[0]
    return (
        f"{axis} sends most ({size_text(size)} in a step) and crosses nodes: "
        f'mesh="{mesh}" sends {size_text(best)} between nodes in all instead of '
        f"{size_text(now.total())}"
    )


def renumbered(node: Node, numbers: Numbering) -> Node:
    return lambda device: node(numbers[device])


def meshes(traffic: AxisTraffic) -> Iterator[tuple[str, Numbering]]:
    """The numbers of devices under each mesh that a builder takes."""
    rows = traffic.job.roles.rows
    ranks, count = len(rows[0]), len(rows)
    places = [(i, j, device) for i, row in enumerate(rows) for j, device in enumerate(row)]
    yield "dp,pp", {device: i * ranks + j for i, j, device in places}
    yield "pp,dp", {device: j * count + i for i, j, device in places}
    ep = replicas_of_experts(traffic)
    if ep and count % ep == 0:
        yield (
            "dp,pp,ep",
            {device: (i // ep * ranks + j) * ep + i % ep for i, j, device in places},
        )


def replicas_of_experts(traffic: AxisTraffic) -> int | None:
    """How many replicas divide experts among them; None if none do."""
    exchanged = [key for key, several in traffic.met.items() if isinstance(several[0], Exchange)]
    groups = [traffic.job.group(grouping, role) for role, grouping in exchanged]
    rows = traffic.job.roles.row_of
    return len({id(rows[device]) for device in groups[0]}) if groups else None
