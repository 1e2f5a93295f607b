"""The training DAG as a value: queries, and functions that return a new DAG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from math import prod
from operator import eq

from piper.ir.filters import ANY, Both, Either, Filter, Not, Tag, Wanted, accepts, fits
from piper.ir.graph import Topology, data_flow, with_precedences
from piper.ir.host_copies import HostCopies, Offloaded
from piper.ir.lanes import lanes_of
from piper.ir.maker import Maker
from piper.ir.message_order import MessageOrder
from piper.ir.model import Model
from piper.ir.naming import replica_buffer
from piper.ir.nodes import Compute, Node, Precedence, Transfer
from piper.ir.origins import Origins
from piper.ir.placement.devices import lists_once
from piper.ir.placement.placements import Cut, Invariant, Placement
from piper.ir.placement.replicas import Replicas, distinct, replicas
from piper.ir.placement.residency import Residency
from piper.ir.sharding import Division, Sharding, Shardings, held_specs, sharding_of
from piper.ir.values import LOADED, PER_DEVICE, TensorSpec, Value
from piper.names import PASS, RUN, BucketId, Device, NodeId, RegionId, Share, ValueId

Key = tuple[Tag, ...]
ABOUT_NODES = (
    "producers", "consumers", "origins", "computes", "devices", "tag_names", "_indices", "_places",
    "proven", "data_flow",
)  # fmt: skip


@dataclass(frozen=True)
class Dag:
    """Nodes in a fixed order, the values they exchange, and what must precede what.

    `makers` says which directive or pass made a node; `dimensions` what was split into how many;
    `residencies` how replicas share a bucket, if they do.
    """

    model: Model
    nodes: Mapping[NodeId, Node]
    values: Mapping[ValueId, Value]
    precedences: tuple[Precedence, ...] = ()
    # The same orders with less freedom, in which the schedule may be faster. They are not printed.
    stricter: tuple[tuple[Precedence, ...], ...] = field(default=(), compare=False)
    message_orders: tuple[MessageOrder, ...] = ()  # until the passes have made what they name
    dimensions: tuple[tuple[str, int], ...] = ()
    makers: Mapping[NodeId, Maker] = field(default_factory=dict)
    residencies: Mapping[BucketId, Residency] = field(default_factory=dict)
    replicated: tuple[RegionId, ...] = ()  # by `Replicate`
    shardings: Shardings = field(default_factory=dict)  # how experts are divided
    # How other regions are divided, by tokens or weights.
    divisions: Mapping[RegionId, Division] = field(default_factory=dict)
    offloads: Mapping[tuple[Offloaded, RegionId], HostCopies] = field(default_factory=dict)
    streams: tuple[Share, ...] = ()  # SMs and priorities, by `Stream`; others use the rest
    sequence: tuple[NodeId, ...] = ()  # empty until the schedule pass: all nodes, in time order
    times: Mapping[NodeId, tuple[float, float]] = field(default_factory=dict)  # expected
    # As devices of replicas with other numbers of rows see it: the same nodes, in the same order.
    others: Mapping[Device, Dag] = field(default_factory=dict)
    # of each message: expected latency, and seconds to send it; empty until the gathers pass
    transits: Mapping[NodeId, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def producers(self) -> dict[ValueId, NodeId]:
        return {value: node.id for node in self.nodes.values() for value in node.writes}

    @cached_property
    def consumers(self) -> dict[ValueId, list[NodeId]]:
        """The nodes that read each value. A node that reads it twice is listed twice."""
        found: dict[ValueId, list[NodeId]] = {}
        for node in self.nodes.values():
            for total in node.reads:
                for value in total:
                    if value in found:
                        found[value].append(node.id)
                    else:
                        found[value] = [node.id]
        return found

    @cached_property
    def origins(self) -> Origins:
        """Where values come from: their microbatch, and what messages added up."""
        return Origins(self.nodes, self.values)

    @cached_property
    def computes(self) -> tuple[Compute, ...]:
        return tuple(node for node in self.nodes.values() if isinstance(node, Compute))

    @cached_property
    def topology(self) -> Topology:
        """The graph of all dependencies, with integers as vertices."""
        flow = self.data_flow
        return with_precedences(flow, self.precedences) if self.precedences else flow

    @cached_property
    def data_flow(self) -> Topology:
        """The same graph without precedences."""
        return data_flow(self.nodes)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device that has a node, in rising order."""
        lists = lists_once(node.devices for node in self.nodes.values())
        return tuple(sorted(set(chain.from_iterable(lists))))

    @cached_property
    def lanes(self) -> dict[tuple[Device, ...], int]:
        """The lane of each device list: devices that share one run one node after the other."""
        return lanes_of(self.nodes.values())

    def seen_by(self, device: Device) -> Dag:
        """This DAG, or that of a device whose replica has another number of rows."""
        return self.others.get(device, self)

    @cached_property
    def teams(self) -> list[tuple[Dag, int]]:
        """How many teams of replicas see this DAG, and those of other numbers of rows."""
        first = (self.replicas.lists[0][team[0]] for team in self.replicas.teams)
        seen = list(map(self.seen_by, first))
        count = Counter(map(id, seen))
        return [(one, count[key]) for key, one in {id(one): one for one in seen}.items()]

    @cached_property
    def shares_devices(self) -> bool:
        """Whether a device has several replicas of a region, or would send something to itself."""
        if any(len(distinct(row)) < len(row) for row in self.replicas.lists):
            return True
        sent = [node for node in self.nodes.values() if isinstance(node, Transfer)]
        pairs = {(id(node.source), id(node.devices)): node for node in sent}.values()
        return any(any(map(eq, one.source, one.devices)) for one in pairs)

    @cached_property
    def local_values(self) -> Mapping[ValueId, Value]:
        """All values, by the names that they have on devices: each replica there has its own."""
        if not self.shares_devices:
            return self.values
        most = max(count for row in self.replicas.lists for count in Counter(row).values())
        feed = self.replicas.parts
        found = dict(self.values)
        for name, value in self.values.items():
            if value.role in LOADED:
                found.update((replica_buffer(name, k), value.within(k, feed)) for k in range(feed))
            elif value.role not in PER_DEVICE:
                found.update((replica_buffer(name, k), value) for k in range(1, most))
        return found

    @cached_property
    def tag_names(self) -> tuple[str, ...]:
        """Every key that a filter can use at this point."""
        keys = chain.from_iterable((key for key, _ in node.tags) for node in self.computes)
        runs = (RUN,) if any(region.run for region in self.model.regions) else ()
        return (*dict.fromkeys(keys), *runs, PASS)

    @cached_property
    def proven(self) -> set[object]:
        """Rules that are already known to hold for these nodes."""
        return set()

    @cached_property
    def _indices(self) -> dict[tuple[str, ...], dict[Key, list[Compute]]]:
        return {}

    def index(self, keys: tuple[str, ...]) -> dict[Key, list[Compute]]:
        """Compute nodes by their values of these keys. Built once per set of keys."""
        if keys not in self._indices:
            groups: dict[Key, list[Compute]] = {}
            runs = {r.id: r.run for r in self.model.regions} if RUN in keys else {}
            for node in self.computes:
                key = tag_values(node, keys, runs.get(node.region, 0))
                groups.setdefault(key, []).append(node)
            self._indices[keys] = groups
        return self._indices[keys]

    @cached_property
    def _places(self) -> dict[NodeId, int]:
        return {node.id: place for place, node in enumerate(self.computes)}

    def select(self, wanted: Filter) -> list[Compute]:
        """The compute nodes that a filter matches, in the order of the DAG."""
        match wanted:
            case Either():
                return self._in_order(node for part in wanted.parts for node in self.select(part))
            case Both():
                first, *others = wanted.parts
                found = ((node, self.tags_of(node)) for node in self.select(first))
                return [n for n, tags in found if all(fits(other, tags) for other in others)]
            case Not():
                return [n for n in self.computes if not fits(wanted.part, self.tags_of(n))]
            case Filter():
                return self._select_plain(wanted)

    def _select_plain(self, wanted: Filter) -> list[Compute]:
        groups = self.index(wanted.keys)
        exact = tuple([value for _, value in wanted.items])
        if exact in groups:  # no key of a group is "*" or several values
            return list(groups[exact])  # type: ignore[index]
        return self._in_order(chain.from_iterable(groups[key] for key in matching(groups, exact)))

    def _in_order(self, nodes: Iterable[Compute]) -> list[Compute]:
        found = {node.id: node for node in nodes}
        return [found[name] for name in sorted(found, key=self._places.__getitem__)]

    def tags_of(self, node: Compute) -> dict[str, Tag]:
        """The tags of a node as filters see them, PASS and RUN among them."""
        run = self.model.by_id[node.region].run
        return {RUN: run, **dict(node.tags), PASS: str(node.phase)}

    def predecessors(self, node: Node) -> Iterator[NodeId]:
        """Nodes that write what this one reads (data edges only)."""
        for value in chain.from_iterable(node.reads):
            if value in self.producers:
                yield self.producers[value]

    @cached_property
    def replicas(self) -> Replicas:
        """Which replicas there are, and which of them share a batch."""
        return replicas((node.devices for node in self.computes if node.devices), self.divided)

    @cached_property
    def divided(self) -> tuple[tuple[Device, ...], ...]:
        """The teams of devices that divide regions, each once."""
        found = chain.from_iterable(how.groups for how in set(self.divisions.values()))
        return tuple(dict.fromkeys(found))

    @cached_property
    def teammates(self) -> Mapping[Device, tuple[Device, ...]]:
        """The team of each device, in all regions alike. Also of regions that are whole."""
        found = {device: team for team in self.divided for device in team}
        for row in self.replicas.lists:
            for team in self.replicas.groups(row):
                found.update((device, team) for device in team if device not in found)
        return found

    def member(self, device: Device) -> int:
        """The position of a device in its team."""
        return self.teammates[device].index(device) if self.divisions else 0

    @cached_property
    def places(self) -> dict[RegionId, tuple[Device, ...]]:
        """Where regions are; nowhere before `Place`."""
        return {node.region: node.devices or () for node in self.computes}

    def pieces(self, bucket: BucketId) -> Sharding | None:
        """Which devices hold different pieces of a bucket: experts, or cut parameters."""
        if not self.divisions or self.model.buckets[bucket].placement is not Cut:
            return sharding_of(self.model, self.shardings, bucket)
        users = (region.id for region in self.model.regions if bucket in region.buckets)
        axes = [self.divisions[user].axes[-1] for user in users if user in self.divisions]
        groups = dict.fromkeys(group for axis in axes for group in axis.groups)
        return replace(axes[0], groups=tuple(groups)) if axes else None

    def holding(self, bucket: BucketId) -> Sharding | None:
        """Who adds up gradients of a bucket: devices with the same share of it.

        Devices along an axis of a division give the same gradient of what is whole (Invariant), or
        parts of it (Replicated); these add up all.
        """
        if not self.divisions or self.model.first_uses[bucket] in self.shardings:
            return self.pieces(bucket)
        return self._along(bucket, (Invariant, Cut))

    def repeating(self, bucket: BucketId) -> Sharding | None:
        """Which devices of a team give the same gradient of a bucket."""
        if not self.divisions or self.model.first_uses[bucket] in self.shardings:
            return None
        return self._along(bucket, (Invariant,))

    def _along(self, bucket: BucketId, kinds: tuple[type[Placement], ...]) -> Sharding | None:
        """Groups along those axes of the bucket's division along which it is placed so."""
        home, used = self.model.first_uses[bucket], self.model.buckets[bucket]
        division = self.divisions.get(home)
        if division is None:  # all devices of a team compute it alike
            teams = tuple(dict.fromkeys(self.teammates[device] for device in self.places[home]))
            return Sharding(groups=teams, stream="") if used.placement in kinds else None
        placed = used.along(len(division.axes))
        found = [axis for axis, kind in zip(division.axes, placed, strict=True) if kind in kinds]
        if len(found) == len(division.axes):
            return Sharding(groups=division.groups, stream=found[0].stream)
        return found[0] if found else None

    def held(self, bucket: BucketId) -> tuple[TensorSpec, ...]:
        """What a device holds of a bucket before ZeRO: all of it, or its share of the experts."""
        return held_specs(self.model, self.shardings, bucket)

    def held_gradients(self, bucket: BucketId) -> tuple[TensorSpec, ...]:
        """The gradients of what a device holds of a bucket before ZeRO."""
        return self.model.buckets[bucket].gradients(self.held(bucket))

    def with_nodes(self, changed: Iterable[Node]) -> Dag:
        """Replace nodes of the same id, or add nodes at the end."""
        return replace(self, nodes={**self.nodes, **{node.id: node for node in changed}})

    def moved(self, nodes: Iterable[Node]) -> Dag:
        """Place updates and totals on devices that regions already use.

        Facts about the nodes still hold, so they are neither derived nor checked again.
        """
        return self.tell(self.with_nodes(nodes))

    def with_values(self, new: Mapping[ValueId, Value]) -> Dag:
        return replace(self, values={**self.values, **new})

    def with_precedences(self, new: Iterable[Precedence]) -> Dag:
        ordered = replace(self, precedences=tuple(dict.fromkeys((*self.precedences, *new))))
        return self.known_to(ordered)

    def with_stricter(self, new: Iterable[tuple[Precedence, ...]]) -> Dag:
        return self.known_to(replace(self, stricter=tuple(dict.fromkeys((*self.stricter, *new)))))

    def with_message_orders(self, new: Iterable[MessageOrder]) -> Dag:
        later = tuple(dict.fromkeys((*self.message_orders, *new)))
        return self.known_to(replace(self, message_orders=later))

    def signed(self, makers: Mapping[NodeId, Maker]) -> Dag:
        return self.known_to(replace(self, makers=makers))

    def known_to(self, other: Dag) -> Dag:
        """Copy facts about the nodes to another DAG that has the same nodes."""
        assert other.nodes is self.nodes
        if "lanes" in self.__dict__:
            other.__dict__["lanes"] = self.lanes
        return self.tell(other)

    def in_teams_of(self, whole: Dag) -> Dag:
        """This DAG of one device, whose teammates are in the whole one."""
        self.__dict__["teammates"] = whole.teammates
        return self

    def tell(self, other: Dag) -> Dag:
        same_edges = other.precedences is self.precedences
        facts = (*ABOUT_NODES, "topology") if same_edges else ABOUT_NODES
        known = self.__dict__
        other.__dict__.update({fact: known[fact] for fact in facts if fact in known})
        return other


def tag_values(node: Compute, keys: tuple[str, ...], run: int) -> Key:
    """The node's values of these keys, including PASS and RUN; None for a missing tag."""
    tags: dict[str, int | str] = dict(node.tags)
    if PASS in keys:
        tags[PASS] = str(node.phase)
    if RUN in keys:
        tags.setdefault(RUN, run)
    return tuple([tags.get(key) for key in keys])


def matching(groups: Mapping[Key, object], wanted: tuple[Wanted, ...]) -> Iterable[Key]:
    """The keys that these values accept. A few indices are looked up, not searched for."""
    lists = [value if isinstance(value, tuple | range) else (value,) for value in wanted]
    if ANY not in wanted and prod(map(len, lists)) < len(groups):
        return [key for key in product(*lists) if key in groups]
    return [key for key in groups if all(accepts(w, f) for w, f in zip(wanted, key, strict=True))]
