"""What makes a DAG valid at each stage: one rule, one function, named by what is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import chain

from piper.errors import Problem, Refused
from piper.ir.cycles import cycle
from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Compute, Exchange, Node, Totals, Transfer, Update
from piper.ir.replicas import replicas
from piper.ir.sharding import sharding_of, within
from piper.ir.values import Origin
from piper.names import BW, COMPUTE, B, F, NodeId, Phase, RegionId

Home = tuple[RegionId, tuple[int, ...]]
Rule = Callable[[Dag], Iterator[Problem]]
BUG = "this is a bug of Piper, please report it with the strategy"


def every_read_has_a_writer(dag: Dag) -> Iterator[Problem]:
    given = [value for value in dag.consumers if value not in dag.producers]
    for value in given:
        known = dag.values.get(value)
        if known is None or known.origin is Origin.FLOW:
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
        first = next((node for node, why in loop if why != "data flow"), loop[0][0])
        yield Problem(
            "these wait for each other" + "".join(rows),
            f"let the order put {first} after what it needs, or in the same slot",
        )


def every_gradient_is_counted_once(dag: Dag) -> Iterator[Problem]:
    """Each use of a trainable parameter reaches the optimizer on exactly one way."""
    for node in dag.computes:
        if node.phase in (B, BW):
            for value in node.writes:
                if value.startswith("g:"):
                    readers = [r for r in dag.consumers.get(value, ()) if adds(dag.nodes[r])]
                    if len(readers) != 1:
                        yield Problem(f"{value} is added up {len(readers)} times", BUG)


def adds(node: Node) -> bool:
    return isinstance(node, Update | Transfer | Collective)


def every_region_is_placed(dag: Dag) -> Iterator[Problem]:
    missing = dict.fromkeys(node.region for node in dag.computes if node.devices is None)
    for region in missing:
        mine = dict(dag.model.by_id[region].tags)
        keys = dict.fromkeys(key for other in dag.model.regions for key, _ in other.tags)
        tags = ", ".join(f"{key}={mine.get(key)}" for key in keys)
        yield Problem(f"{region} has no device", f"add Place(where({tags}), devices=[...])")


def backward_runs_where_forward_ran(dag: Dag) -> Iterator[Problem]:
    """What the forward saved is on its devices only."""
    home = {(n.region, n.tags): n.devices for n in dag.computes if n.phase is F}
    for node in dag.computes:
        forward = home[node.region, node.tags]
        if node.devices != forward:
            yield Problem(
                f"{node.id} is on {show(node.devices)}, its forward on {show(forward)}",
                "place a region's passes together: leave PASS out of the filter of `Place`",
            )


def show(devices: tuple[int, ...] | None) -> str:
    return f"devices {list(devices)}" if devices else "no device"


def replicas_are_kept_equal(dag: Dag) -> Iterator[Problem]:
    """Without something that averages their gradients, replicas would drift apart."""
    place = {node.region: node.devices or () for node in dag.computes}
    for bucket, region in dag.model.first_uses.items():
        devices, used = place[region], dag.model.buckets[bucket]
        cut = dag.shardings.get(region)
        if cut and cut.ways == len(devices):
            continue  # every device has experts of its own
        if len(devices) > 1 and used.trainable and bucket not in dag.residencies:
            tags = ", ".join(f"{key}={index}" for key, index in dag.model.by_id[region].tags)
            yield Problem(
                f"{region} is on {show(devices)}, and nothing keeps its replicas equal",
                f"add Replicate(where({tags}), devices={list(devices)})",
            )


def replicas_are_where_they_are_placed(dag: Dag) -> Iterator[Problem]:
    place = {node.region: node.devices or () for node in dag.computes}
    for bucket, how in dag.residencies.items():
        region = dag.model.first_uses[bucket]
        if set(how.devices) != set(place[region]):
            yield Problem(
                f"{region} is placed on {show(place[region])}, but replicated on "
                f"{show(how.devices)}",
                f"write devices={list(place[region])} in its `Replicate`",
            )


def experts_are_where_they_are_placed(dag: Dag) -> Iterator[Problem]:
    place = {node.region: node.devices or () for node in dag.computes}
    for region, how in dag.shardings.items():
        if set(how.devices) != set(place[region]):
            yield Problem(
                f"{region} is placed on {show(place[region])}, but sharded on {show(how.devices)}",
                f"write devices={list(place[region])} in its `Shard`, or groups of them",
            )


def neighbours_of_experts_are_with_them(dag: Dag) -> Iterator[Problem]:
    """Tokens leave for their experts from where they are, and come back there."""
    if not dag.shardings:
        return
    for one, other in neighbours(dag):
        for region, beside in ((one, other), (other, one)):
            if region[0] in dag.shardings:
                yield Problem(
                    f"{region[0]} is sharded on {show(region[1])}, its neighbour {beside[0]} is on "
                    f"{show(beside[1])}",
                    f"place {beside[0]} on {show(region[1])} too",
                )


def groups_fit_the_experts(dag: Dag) -> Iterator[Problem]:
    """ZeRO groups must cut the holders of each share of the experts alike."""
    for bucket, how in dag.residencies.items():
        cut = sharding_of(dag.model, dag.shardings, bucket)
        parts = within(how, cut) if cut else []
        sizes = {len(group) for groups in parts for group in groups}
        if cut and (len(sizes) > 1 or len(set(map(len, parts))) > 1):
            yield Problem(
                f"{bucket} is replicated in groups {[list(g) for g in how.groups]}, but its "
                f"experts are in groups {[list(g) for g in cut.groups]}",
                "write the same groups in its `Shard` and its `Replicate`, or no groups in the "
                "`Replicate`",
            )


def replicas_update_no_buffers(dag: Dag) -> Iterator[Problem]:
    """Each replica would see its own data only, and go its own way."""
    place = {node.region: node.devices or () for node in dag.computes}
    for region in dag.model.regions:
        if region.stateful and len(place[region.id]) > 1:
            yield Problem(
                f"{region.id} updates buffers (running statistics) on {show(place[region.id])}: "
                "replicas would not stay equal",
                "use a norm without running statistics, put the module in eval mode, or place "
                f"it on one device: devices=[{place[region.id][0]}]",
            )


def feeds_are_alike(dag: Dag) -> Iterator[Problem]:
    """Replicas that share devices are fed together: equally many in each feed."""
    found = replicas(node.devices for node in dag.computes if node.devices)
    if len(set(map(len, found.feeds))) > 1:
        yield Problem(
            f"some devices serve {len(found.feeds[0])} replicas, others "
            f"{len(found.feeds[-1])}: {[list(row) for row in found.lists]}",
            "give all regions the same device lists, or mirror all of them",
        )


def buffers_that_change_are_on_one_device(dag: Dag) -> Iterator[Problem]:
    """A region that updates buffers does so on its own device only."""
    place = {node.region: node.devices for node in dag.computes}
    users: dict[str, list[RegionId]] = {}
    for region in dag.model.regions:
        for bucket in region.buckets:
            if dag.model.buckets[bucket].buffers:
                users.setdefault(bucket, []).append(region.id)
    for regions in users.values():
        changing = [r for r in regions if dag.model.by_id[r].stateful]
        for user in regions:
            if changing and place[user] != place[changing[0]]:
                yield Problem(
                    f"{changing[0]} updates buffers that {user} uses on other devices",
                    f"place {changing[0]} and {user} on the same devices",
                )


def every_microbatch_of_a_region_is_placed_alike(dag: Dag) -> Iterator[Problem]:
    home: dict[RegionId, tuple[int, ...] | None] = {}
    for node in dag.computes:
        if home.setdefault(node.region, node.devices) != node.devices:
            yield Problem(
                f"{node.id} is on {show(node.devices)}, other parts on {show(home[node.region])}",
                "place all microbatches of a region on the same devices: "
                "put `Place` before `Split`",
            )


def neighbours(dag: Dag) -> list[tuple[Home, Home]]:
    """Regions on different devices of which the second reads what the first one has: values that
    it writes, or parameters that are at home there."""
    place = {node.region: node.devices or () for node in dag.computes}
    writer = {value: region.id for region in dag.model.regions for value in region.outputs}
    pairs = dict.fromkeys(
        (writer[value], region.id)
        for region in dag.model.regions
        for value in region.inputs
        if value in writer
    )
    pairs |= dict.fromkeys(
        (dag.model.first_uses[bucket], region.id)
        for region in dag.model.regions
        for bucket in region.buckets
    )
    found = [((a, place[a]), (b, place[b])) for a, b in pairs]
    return [(one, other) for one, other in found if one[1] != other[1]]


def replicas_stay_on_their_device(dag: Dag) -> Iterator[Problem]:
    """Of two lists that differ, each replica has different devices."""
    for one, other in neighbours(dag):
        if any(a == b for a, b in zip(one[1], other[1], strict=False)):
            yield Problem(
                f"{one[0]} is on {show(one[1])}, {other[0]}, which reads it, on {show(other[1])}: "
                "some replicas stay where they are, others do not",
                "give both sides the same list, or lists that differ at every place",
            )


def neighbours_have_equally_many_replicas(dag: Dag) -> Iterator[Problem]:
    for one, other in neighbours(dag):
        if len(one[1]) != len(other[1]):
            yield Problem(
                f"{one[0]} is on {show(one[1])}, {other[0]}, which reads it, on {show(other[1])}",
                "give both sides lists of the same length, replica i sends to replica i",
            )


def every_read_is_local(dag: Dag) -> Iterator[Problem]:
    """Once transfers are in, a node reads only what is on its own devices."""
    place = {value: node for node in dag.nodes.values() for value in node.writes}
    for node in dag.nodes.values():
        here = node.source if isinstance(node, Transfer) else node.devices
        for value in chain.from_iterable(node.reads):
            maker = place.get(value)
            if maker and not isinstance(node, Totals) and not is_at(maker, here):
                yield Problem(f"{node.id} reads {value}, which is not on {show(here)}", BUG)


def is_at(maker: Node, here: tuple[int, ...] | None) -> bool:
    return maker.devices is here or maker.devices == here or isinstance(maker, Totals)


def orders_name_all_microbatches_or_none(dag: Dag) -> Iterator[Problem]:
    """An order that leaves out one microbatch of a pass is more likely a slip than a wish."""
    named: dict[tuple[RegionId, Phase], set[NodeId]] = {}
    for precedence in dag.precedences:
        if precedence.maker.startswith("order"):
            for name in chain(precedence.before, precedence.after):
                named.setdefault(pass_of(dag, name), set()).add(name)
    for node in dag.computes:
        others = named.get((node.region, node.phase))
        if others and node.id not in others:
            yield Problem(
                f"the order names {node.region} {node.phase} for {len(others)} of its "
                f"microbatches, but not {node.id}",
                f"add a slot for {node.id}, or leave {node.region} {node.phase} out of the order",
            )


def pass_of(dag: Dag, node: NodeId) -> tuple[RegionId, Phase]:
    found = dag.nodes[node]
    assert isinstance(found, Compute)
    return found.region, found.phase


def every_stream_with_a_share_is_used(dag: Dag) -> Iterator[Problem]:
    """Known only when all communication is in."""
    if not dag.streams:
        return
    messages = (n for n in dag.nodes.values() if isinstance(n, Transfer | Collective | Exchange))
    used = [COMPUTE, *sorted({node.stream for node in messages})]
    for share in dag.streams:
        if share.stream not in used:
            near = get_close_matches(share.stream, used, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield Problem(
                f"nothing runs on the stream {share.stream!r}, which has a share of the GPU",
                f"name one of {', '.join(used)}, or leave this `Stream` out{hint}",
            )


CAPTURED: tuple[Rule, ...] = (
    every_read_has_a_writer,
    every_value_is_written_once,
    nothing_waits_for_itself,
    every_gradient_is_counted_once,
)
PLACED: tuple[Rule, ...] = (
    every_region_is_placed,
    backward_runs_where_forward_ran,
    every_microbatch_of_a_region_is_placed_alike,
    neighbours_have_equally_many_replicas,
    replicas_stay_on_their_device,
    feeds_are_alike,
    replicas_are_where_they_are_placed,
    experts_are_where_they_are_placed,
    neighbours_of_experts_are_with_them,
    groups_fit_the_experts,
    replicas_are_kept_equal,
    replicas_update_no_buffers,
    buffers_that_change_are_on_one_device,
    orders_name_all_microbatches_or_none,
)
LOWERABLE: tuple[Rule, ...] = (
    *CAPTURED,
    every_read_is_local,
)
FINAL: tuple[Rule, ...] = (every_stream_with_a_share_is_used,)


ABOUT_ORDER = (nothing_waits_for_itself, orders_name_all_microbatches_or_none)


def require(dag: Dag, rules: tuple[Rule, ...]) -> None:
    """Refuse a DAG that breaks a rule; the first rule that finds problems reports all of them."""
    for rule in rules:
        if rule in dag.proven:
            continue
        problems = list(rule(dag))
        if problems:
            raise Refused(*problems[:8])
        if rule not in ABOUT_ORDER:
            dag.proven.add(rule)
