"""Conversions between parts of divided regions become messages of the devices that divide them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.nodes import Compute, Node, Precedence, Redistribute, Sum
from piper.ir.placement.placements import Conversion, Replicated, Step
from piper.ir.placement.residency import Residency
from piper.ir.sharding import Sharding, among_holders
from piper.names import BW, BucketId, F, NodeId, RegionId, ValueId

CONVERSIONS = Maker("conversions")
MESSAGE_BYTES = 25 * 2**20


def insert_redistributions(dag: Dag) -> Dag:
    """Each pass of a conversion becomes a message, a local slice, or nothing.

    rewrite:
        F(column) -> F(convert) -> F(row);  B(row) -> B(convert) -> B(column)
        -->
        F(column) -> all-gather -> F(row);  B(row) -> reduce-scatter -> B(column)
    """
    if not dag.divisions:
        return dag
    rewrite = Rewrite(dag)
    parts = [part for node in dag.nodes.values() for part in rewrite.parts(node)]
    nodes = {node.id: rewrite.rewired(node) for node in parts}
    return replace(
        dag,
        nodes=nodes,
        makers={name: dag.makers.get(name, CONVERSIONS) for name in nodes},
        precedences=tuple(compute_only(dag.precedences, nodes)),
        stricter=tuple(tuple(compute_only(orders, nodes)) for orders in dag.stricter),
        residencies=dict(residencies(dag)),
    )


@dataclass
class Rewrite:
    """The state of the pass: values that are others under another name."""

    dag: Dag
    same: dict[ValueId, Sum] = field(default_factory=dict)

    def parts(self, node: Node) -> Iterator[Node]:
        region = self.dag.model.by_id[node.region] if isinstance(node, Compute) else None
        if region is None or region.conversion is None:
            yield node
        elif isinstance(node, Compute) and node.phase is not BW:  # which has nothing to do
            yield from self.redistributed(node, region.conversion)

    def redistributed(self, node: Compute, conversion: Conversion) -> Iterator[Redistribute]:
        """The last argument of a backward is the gradient."""
        step = conversion.forward if node.phase is F else conversion.backward
        read, written = node.reads[-1], node.writes[0]
        if step is Step.NOTHING:
            self.same[written] = read
            return
        how = self.dag.divisions[node.region].axes[self.dag.model.by_id[node.region].axis]
        assert node.devices is not None and node.stream is not None
        yield Redistribute(
            id=node.id, region=node.region, phase=node.phase, step=step,
            microbatch=node.microbatch, tags=node.tags, reads=(read,), writes=(written,),
            devices=node.devices, groups=how.groups, stream=how.stream, onward=node.stream,
        )  # fmt: skip

    def rewired(self, node: Node) -> Node:
        if not any(value in self.same for total in node.reads for value in total):
            return node
        return replace(node, reads=tuple(tuple(self.sources(total)) for total in node.reads))

    def sources(self, total: Sum) -> Iterator[ValueId]:
        for value in total:
            if value in self.same:
                yield from self.sources(self.same[value])
            else:
                yield value


def compute_only(orders: Iterable[Precedence], nodes: dict[NodeId, Node]) -> Iterator[Precedence]:
    """Orders are about compute. A message starts when its value is there.

    An order that names messages only keeps them, because others may be ordered by way of it.
    """
    for order in orders:
        before, after = (kept(names, nodes) for names in (order.before, order.after))
        if before == order.before and after == order.after:
            yield order
        elif after and (before or not order.before):
            yield replace(order, before=before, after=after)


def kept(names: tuple[NodeId, ...], nodes: dict[NodeId, Node]) -> tuple[NodeId, ...]:
    here = tuple(name for name in names if name in nodes)
    return tuple(n for n in here if not isinstance(nodes[n], Redistribute)) or here


def residencies(dag: Dag) -> Iterator[tuple[BucketId, Residency]]:
    """Gradients are added up by devices with the same share; parts of gradients by all."""
    trained = {bucket for region in dag.model.regions for bucket in dag.model.trained(region)}
    for bucket, home in dag.model.first_uses.items():
        how, holding = dag.residencies.get(bucket), dag.holding(bucket)
        if how is not None:
            yield bucket, among_holders(how, holding) if holding else how
        elif bucket in trained and has_parts(dag, bucket, home):
            yield bucket, of_one_team(dag, bucket, home)


def has_parts(dag: Dag, bucket: BucketId, home: RegionId) -> bool:
    """Whether devices of a team have parts of its gradient."""
    axes = len(dag.divisions[home].axes) if home in dag.divisions else 1
    return Replicated in dag.model.buckets[bucket].along(axes)


def of_one_team(dag: Dag, bucket: BucketId, home: RegionId) -> Residency:
    """Nothing is sharded: one all-reduce per step, on the stream of the messages.

    Of experts and cut parameters, only devices that hold the same ones add up gradients.
    """
    how, holding = dag.shardings.get(home) or dag.divisions[home], dag.holding(bucket)
    stream = how.stream if isinstance(how, Sharding) else how.axes[0].stream
    whole = Residency(
        groups=how.groups, zero=0, message_bytes=MESSAGE_BYTES, reduce_stream=stream,
        gather_stream=stream, gather_ahead=1, gather_buffers=2, once=True,
    )  # fmt: skip
    return among_holders(whole, holding) if holding else whole
