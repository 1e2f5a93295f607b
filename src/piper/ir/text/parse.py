"""Read a DAG from its text: what `ir/text/text.py` prints, or what a test has written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import chain
from typing import Any, get_type_hints

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.host_copies import HostCopies, Offloaded
from piper.ir.maker import Maker
from piper.ir.message_order import MessageOrder
from piper.ir.model import Model
from piper.ir.naming import node_id, update_id
from piper.ir.nodes import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Kind,
    Node,
    Precedence,
    Redistribute,
    Store,
    Sum,
    Tags,
    Totals,
    Transfer,
    Update,
    Way,
)
from piper.ir.placement.placements import Step
from piper.ir.placement.residency import Residency
from piper.ir.sharding import Division, Sharding
from piper.ir.text.notation import (
    LIST,
    SPEC,
    Found,
    devices_of,
    groups_of,
    ids_of,
    maker_of,
    meeting,
    message_of,
    pairs,
    share_of,
    slot_of,
    specs_of,
    sum_of,
    tags_of,
)
from piper.ir.text.text import STREAM, describe
from piper.ir.training import step_values
from piper.ir.values import ITEM_BYTES, Role, TensorSpec, Value
from piper.names import BucketId, NodeId, Phase, RegionId, Share, ValueId, amount

SINGLE = re.compile(rf"(?P<devices>{LIST})(?: \[(?P<stream>[^\[\]]*)\])?|nowhere yet")
SHARED = re.compile(
    rf"(?P<groups>{LIST}(?: {LIST})*)(?: => (?P<there>{LIST}))? \[(?P<stream>[^\[\]]*)\]"
    rf"(?:, replicas (?P<replicas>{LIST}))?(?:, messages(?P<messages>(?: \d+(?:\+\d+)*)*))?"
    r"(?:, buffer (?P<slot>\d+))?(?:, lag (?P<lag>\d+))?(?:, (?P<way>[a-z-]+))?"
    r"(?:, then (?P<onward>\S+))?(?: \{(?P<tags>[^{}]*)\})?"
)


def parse(text: str, model: Model) -> Dag:
    """The DAG of a text. Costs and expected times are not part of the text."""
    reader = Reader(model)
    for number, line in enumerate(text.splitlines(), start=1):
        reader.number = number
        if line.strip():
            reader.take(line.strip())
    return reader.dag()


@dataclass
class Reader:
    """What has been read so far. Nodes are built last, because they need all values."""

    model: Model
    number: int = 0  # of the line
    header: Found | None = None
    nodes: list[tuple[int, Found]] = field(default_factory=list)
    orders: list[tuple[int, Found]] = field(default_factory=list)
    message_orders: list[tuple[int, Found]] = field(default_factory=list)
    special: dict[ValueId, Value] = field(default_factory=dict)
    streams: tuple[Share, ...] = ()
    replicated: tuple[RegionId, ...] = ()
    shardings: dict[RegionId, Sharding] = field(default_factory=dict)
    divisions: dict[RegionId, Division] = field(default_factory=dict)
    residencies: dict[BucketId, Residency] = field(default_factory=dict)
    offloads: dict[tuple[Offloaded, RegionId], HostCopies] = field(default_factory=dict)

    def take(self, line: str) -> None:
        for form, keep in FORMS:
            found = form.fullmatch(line)
            if found:
                keep(self, found)
                return
        self.refuse(f"{line!r} is not a line of a DAG", "write it as `piper show --dag` prints it")

    def refuse(self, what: str, fix: str) -> None:
        raise Refused(Problem(f"line {self.number}: {what}", fix))

    def known(self, names: Iterable[str], table: Iterable[str], what: str) -> None:
        for name in names:
            if name not in table:
                self.refuse(f"{name} is an unknown {what}", "choose from those that the DAG has")

    def take_header(self, found: Found) -> None:
        if self.header:
            self.refuse("the DAG begins again", "write one `dag:` line, at the top")
        self.header = found

    def take_streams(self, found: Found) -> None:
        self.streams = tuple(map(share_of, re.findall(r"[^,(]+(?:\([^)]*\))?", found["streams"])))

    def take_replicated(self, found: Found) -> None:
        self.replicated = tuple(map(RegionId, found["names"].split(", ")))
        self.known(self.replicated, self.model.by_id, "region")

    def take_experts(self, found: Found) -> None:
        self.known([found["region"]], self.model.by_id, "region")
        cut = Sharding(groups=groups_of(found["groups"]), stream=found["stream"])
        region, what = RegionId(found["region"]), found["what"]
        if what == "experts":
            self.shardings[region] = cut
        else:
            self.divisions[region] = replace(self.divisions.get(region, Division()), **{what: cut})

    def take_buckets(self, found: Found) -> None:
        words = self.settings(found["rest"], Residency)
        needed = [f.name for f in fields(Residency) if f.default is MISSING and f.name != "groups"]
        missing = [name for name in needed if name not in words]
        if missing:
            self.refuse(f"{', '.join(missing)} is missing", f"write {missing[0]}=...")
        how = Residency(groups=groups_of(found["groups"]), **words)
        names = found["names"].split(", ")
        self.known(names, self.model.buckets, "bucket")
        self.residencies.update((BucketId(name), how) for name in names)

    def take_offload(self, found: Found) -> None:
        names = found["names"].split(", ")
        self.known([found["what"]], [*Offloaded], "kind of memory")
        self.known(names, self.model.by_id, "region")
        how = HostCopies(**self.settings(found["rest"], HostCopies))
        self.offloads.update(((Offloaded(found["what"]), RegionId(name)), how) for name in names)

    def take_value(self, found: Found) -> None:
        self.known([found["role"]], [*Role], "role of a value")
        words = self.settings(found["rest"], Value)
        value = Value(specs_of(found["specs"]), Role(found["role"]), **words)
        self.known((spec.dtype for spec in value.specs), ITEM_BYTES, "type of a tensor")
        self.special.update((ValueId(name), value) for name in found["names"].split(", "))

    def settings(self, rest: str, kind: type[Value | Residency | HostCopies]) -> dict[str, Any]:
        """`zero=3 once=True bundle`, by the types of the fields."""
        types, found = get_type_hints(kind), {}
        for word in rest.split():
            name, _, shown = word.partition("=")
            self.known([name], types, "field")
            if types[name] is int and not shown.isdecimal():
                self.refuse(f"{name} is {shown!r}", "write a whole number")
            truth = shown in ("", "True") if types[name] is bool else shown
            found[name] = int(shown) if types[name] is int else truth
        return found

    def dag(self) -> Dag:
        if self.header is None:
            self.number = 1
            self.refuse("the text does not begin with `dag:`", "write `dag: 2 nodes, 1 region`")
        assert self.header is not None
        dimensions = tuple((k, int(n)) for k, n in pairs(self.header["split"]))
        values = {**step_values(self.model, dimensions), **self.special}
        builder = Builder(self, values, computes(self.model, dimensions))
        nodes = dict(builder.all())
        if len(nodes) != int(self.header["nodes"].replace(",", "")):
            self.number, found = 1, amount(len(nodes), "node")
            self.refuse(
                f"the DAG has {found}, not {self.header['nodes']}",
                f"write `dag: {found}`, if none is missing",
            )
        return Dag(
            model=self.model, nodes=nodes, values=values, dimensions=dimensions,
            precedences=tuple(self.precedences(nodes)), makers=builder.makers,
            message_orders=tuple(self.waiting_orders(nodes)),
            residencies=self.residencies, replicated=self.replicated, shardings=self.shardings,
            divisions=self.divisions, streams=self.streams, offloads=self.offloads,
            sequence=tuple(nodes) if self.header["scheduled"] else (),
        )  # fmt: skip

    def precedences(self, nodes: Mapping[NodeId, Node]) -> Iterator[Precedence]:
        for number, found in self.orders:
            self.number = number
            before, after = (ids_of(found[side]) for side in ("before", "after"))
            self.known([*before, *after], nodes, "node")
            flags = (bool(found["loose"]), bool(found["partial"]))
            yield Precedence(before, after, maker_of(found["maker"]), *flags)

    def waiting_orders(self, nodes: Mapping[NodeId, Node]) -> Iterator[MessageOrder]:
        for number, found in self.message_orders:
            self.number = number
            slots = tuple(map(slot_of, found["slots"].split(" then ")))
            names = (name for s in slots for name in (*s.nodes, *s.later, *s.arrivals))
            self.known(names, nodes, "node")
            yield MessageOrder(slots, maker_of(found["maker"]))


Computes = Mapping[NodeId, tuple[RegionId, Phase, int | None]]


def computes(model: Model, dimensions: tuple[tuple[str, int], ...]) -> Computes:
    """The names of all compute nodes."""
    parts: Iterable[int | None] = range(dimensions[0][1]) if dimensions else (None,)
    return {
        node_id(region.id, phase, part): (region.id, phase, part)
        for part in parts
        for region in model.regions
        for phase in Phase
    }


@dataclass
class Builder:
    """Builds nodes from lines, once all values are known."""

    reader: Reader
    values: Mapping[ValueId, Value]
    computes: Computes
    makers: dict[NodeId, Maker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.updates = {update_id(bucket): bucket for bucket in self.reader.model.buckets}
        assert self.reader.header is not None
        self.split = [name for name, _ in pairs(self.reader.header["split"])]

    def all(self) -> Iterator[tuple[NodeId, Node]]:
        seen: set[NodeId] = set()
        for number, found in self.reader.nodes:
            self.reader.number = number
            node = self.node(found)
            if node.id in seen:
                self.reader.refuse(f"{node.id} appears twice", "leave one of the lines out")
            if describe(node).split() != found["node"].split():
                self.reader.refuse("the line has more than its node", f"write {describe(node)}")
            seen.add(node.id)
            if found["maker"] != "pass":
                self.makers[node.id] = maker_of(found["maker"])
            yield node.id, node

    def node(self, found: Found) -> Node:
        reads: tuple[Sum, ...] = tuple(map(sum_of, filter(None, found["reads"].split(", "))))
        writes: Sum = tuple(map(ValueId, filter(None, found["writes"].split(", "))))
        self.reader.known([*chain.from_iterable(reads), *writes], self.values, "value")
        kind, name = found["kind"], NodeId(found["id"])
        if kind in ("transfer", "exchange", "redistribute", "store", "fetch", *Kind):
            where = self.where(SHARED, found)
            return self.message(kind, where, {"id": name, "reads": reads, "writes": writes})
        where = self.where(SINGLE, found)
        devices = devices_of(where["devices"]) if where["devices"] else None
        flow: dict[str, Any] = {"id": name, "reads": reads, "writes": writes, "devices": devices}
        if kind == "totals":
            return Totals(**flow)
        if kind == "update":
            self.reader.known([name], self.updates, "update of a bucket")
            return Update(bucket=self.updates[name], **flow)
        return self.compute(kind, where["stream"], flow)

    def where(self, form: re.Pattern[str], found: Found) -> Found:
        where = form.fullmatch(found["where"])
        if where is None:
            self.reader.refuse(
                f"{found['where']!r} is not where a node of kind {found['kind']} can be",
                "write lists of devices, then the stream: `[0, 2] [dp]`",
            )
        assert where is not None
        return where

    def compute(self, kind: str, stream: str | None, flow: dict[str, Any]) -> Compute:
        self.reader.known([flow["id"]], self.computes, "pass of a region")
        region, phase, part = self.computes[flow["id"]]
        if phase != kind:
            self.reader.refuse(
                f"{flow['id']} is {phase}, not {kind}", f"begin the line with {phase}"
            )
        tags = self.tags(region, part)
        usual = STREAM if flow["devices"] else None
        mine = usual if stream is None else stream or None
        return Compute(region=region, phase=phase, microbatch=part, tags=tags, stream=mine, **flow)

    def message(self, kind: str, where: Found, flow: dict[str, Any]) -> Node:
        if kind == "transfer":
            return self.transfer(where, flow)
        if kind in ("store", "fetch"):
            return self.copy(kind, where, flow)
        if kind == "redistribute":
            return self.redistribute(where, flow)
        return (
            self.exchange(where, flow) if kind == "exchange" else self.collective(kind, where, flow)
        )

    def transfer(self, where: Found, flow: dict[str, Any]) -> Transfer:
        if not where["there"]:
            self.reader.refuse("a transfer has two ends", "write `[0] => [1]`")
        source, there = devices_of(where["groups"]), devices_of(where["there"])
        tags = tags_of(where)
        return Transfer(source=source, devices=there, stream=where["stream"], tags=tags, **flow)

    def copy(self, kind: str, where: Found, flow: dict[str, Any]) -> Store | Fetch:
        flow |= {"devices": devices_of(where["groups"]), "stream": where["stream"]}
        if kind == "fetch":
            return Fetch(tags=tags_of(where), **flow)
        return Store(tags=tags_of(where), lag=int(where["lag"] or 1), **flow)

    def exchange(self, where: Found, flow: dict[str, Any]) -> Exchange:
        self.reader.known([where["way"] or "nothing"], [*Way], "way of an exchange")
        return Exchange(way=Way(where["way"]), tags=tags_of(where), **meeting(where), **flow)

    def redistribute(self, where: Found, flow: dict[str, Any]) -> Redistribute:
        self.reader.known([where["way"] or "nothing"], [*Step], "step of a conversion")
        self.reader.known([flow["id"]], self.computes, "pass of a region")
        region, phase, part = self.computes[flow["id"]]
        return Redistribute(
            region=region, phase=phase, step=Step(where["way"]), microbatch=part,
            tags=self.tags(region, part), onward=where["onward"] or STREAM, **meeting(where),
            **flow,
        )  # fmt: skip

    def tags(self, region: RegionId, part: int | None) -> Tags:
        tags = self.reader.model.by_id[region].tags
        return tags if part is None else (*tags, (self.split[0], part))

    def collective(self, kind: str, where: Found, flow: dict[str, Any]) -> Collective:
        meets, whole = meeting(where), self.whole(Kind(kind), flow)
        ways = 1 if kind == Kind.ALL_REDUCE else len(meets["groups"][0])
        tensors = [tuple(map(int, m.split("+"))) for m in (where["messages"] or "").split()]
        self.reader.known(
            map(str, chain.from_iterable(tensors)), list(map(str, range(len(whole)))), "tensor"
        )
        sent = tuple(message_of(whole, ks, ways) for ks in tensors)
        slot = int(where["slot"]) if where["slot"] else None
        return Collective(kind=Kind(kind), messages=sent, slot=slot, **meets, **flow)

    def whole(self, kind: Kind, flow: dict[str, Any]) -> tuple[TensorSpec, ...]:
        """The bundle that the messages carry."""
        if not flow["reads"] or not flow["writes"]:
            self.reader.refuse(f"{flow['id']} reads or writes nothing", "write one value for each")
        bundle = flow["reads"][0][0] if kind is Kind.REDUCE_SCATTER else flow["writes"][0]
        return self.values[bundle].specs


MAKER = r"  # (?P<maker>.+)"
FORMS: tuple[tuple[re.Pattern[str], Callable[[Reader, Found], None]], ...] = tuple(
    (re.compile(form), keep)
    for form, keep in (
        (
            r"dag: (?P<nodes>[\d,]+) nodes?, [\d,]+ regions?(?P<split>(?: \w+=\d+)*)"
            r"(?P<scheduled>, scheduled)?",
            Reader.take_header,
        ),
        (r"streams: (?P<streams>.+)", Reader.take_streams),
        (r"replicated: (?P<names>.+)", Reader.take_replicated),
        (
            rf"(?P<what>experts|tokens|weights) (?P<region>.+) on "
            rf"(?P<groups>{LIST}(?: {LIST})*) \[(?P<stream>[^\[\]]*)\]",
            Reader.take_experts,
        ),
        (
            rf"buckets (?P<names>.+) on (?P<groups>{LIST}(?: {LIST})*): (?P<rest>.+)",
            Reader.take_buckets,
        ),
        (r"offload (?P<what>\w+) of (?P<names>.+): (?P<rest>.+)", Reader.take_offload),
        (
            rf"value (?P<role>[a-z ]+?) \((?P<specs>(?:{SPEC}(?:, {SPEC})*)?)\)"
            r"(?P<rest>(?: \S+)*?): (?P<names>.+)",
            Reader.take_value,
        ),
        (
            rf"before(?P<loose>, loosely)?(?P<partial>, partly)?: "
            rf"(?P<before>.*) -> (?P<after>.*){MAKER}",
            lambda reader, found: reader.orders.append((reader.number, found)),
        ),
        (
            rf"order: (?P<slots>.*){MAKER}",
            lambda reader, found: reader.message_orders.append((reader.number, found)),
        ),
        (
            r"(?P<node>(?P<kind>\S+) +(?P<id>\S.*?) on (?P<where>(?:\[|nowhere yet).*?): "
            rf"\((?P<reads>.*)\) -> (?P<writes>.*?)){MAKER}",
            lambda reader, found: reader.nodes.append((reader.number, found)),
        ),
    )
)
