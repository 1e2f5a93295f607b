"""Rules about the devices of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from piper.errors import BUG, Problem
from piper.ir.dag import Dag
from piper.ir.nodes import Collective, Exchange, Fetch, Redistribute, Store, Transfer
from piper.ir.rules.neighbours import neighbours, show
from piper.names import COMPUTE, F, RegionId


def every_region_is_placed(dag: Dag) -> Iterator[Problem]:
    missing = dict.fromkeys(node.region for node in dag.computes if node.devices is None)
    for region in missing:
        mine = dict(dag.model.by_id[region].tags)
        keys = dict.fromkeys(key for other in dag.model.regions for key, _ in other.tags)
        tags = ", ".join(f"{key}={mine.get(key)}" for key in keys)
        yield Problem(f"{region} has no device", f"add Place(where({tags}), devices=[...])")


def backward_runs_where_forward_ran(dag: Dag) -> Iterator[Problem]:
    """What the forward saves is only on its own devices."""
    home = {(n.region, n.tags): n.devices for n in dag.computes if n.phase is F}
    for node in dag.computes:
        forward = home[node.region, node.tags]
        if node.devices != forward:
            yield Problem(
                f"{node.id} is on {show(node.devices)}, its forward on {show(forward)}",
                "place a region's passes together: leave PASS out of the filter of `Place`",
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


def buffers_that_change_are_on_one_device(dag: Dag) -> Iterator[Problem]:
    """A region updates buffers only on its own device."""
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


def neighbours_have_equally_many_replicas(dag: Dag) -> Iterator[Problem]:
    for one, other in neighbours(dag):
        if len(one[1]) != len(other[1]):
            yield Problem(
                f"{one[0]} is on {show(one[1])}, {other[0]}, which reads it, on {show(other[1])} "
                "(expected as many replicas on both sides)",
                BUG,
            )


def every_stream_with_a_share_is_used(dag: Dag) -> Iterator[Problem]:
    """Checked last, when all communication is in the DAG."""
    if not dag.streams:
        return
    kinds = Transfer | Collective | Exchange | Redistribute | Store | Fetch
    messages = (node for node in dag.nodes.values() if isinstance(node, kinds))
    used = [COMPUTE, *sorted({node.stream for node in messages})]
    for share in dag.streams:
        if share.stream not in used:
            near = get_close_matches(share.stream, used, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield Problem(
                f"nothing runs on the stream {share.stream!r}, which has a share of the GPU",
                f"name one of {', '.join(used)}, or leave this `Stream` out{hint}",
            )
