"""Rules about regions that several devices compute together."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from piper.errors import BUG, Problem
from piper.ir.dag import Dag
from piper.ir.nodes import Redistribute
from piper.ir.placement.placements import Cut, Replicated, Step
from piper.ir.placement.replicas import distinct
from piper.ir.rules.neighbours import show
from piper.ir.rules.shape import Graphs
from piper.ir.training import Argument
from piper.names import B, F


def divided_regions_have_their_devices(dag: Dag) -> Iterator[Problem]:
    """A region that is divided in n parts is on groups of n devices."""
    for region in dag.model.regions:
        how, devices = dag.divisions.get(region.id), dag.places[region.id]
        ways = how.ways if how else 1
        if region.axes != (tuple(axis.ways for axis in how.axes) if how else ()):
            yield Problem(
                f"{region.id} is divided over {region.ways} devices, but sharded over {ways}",
                "match each region with at most one `Shard`, whatever stage it is in",
            )
        elif how and set(how.devices) != set(devices):
            yield Problem(
                f"{region.id} is placed on {show(devices)}, but sharded on {show(how.devices)}",
                f"write devices={list(devices)} in its `Shard`, or groups of them",
            )


def groups_are_the_same_in_every_stage(dag: Dag) -> Iterator[Problem]:
    """Device i of a stage sends to device i of the next one, which must hold the same part."""
    if not dag.divisions:
        return
    for region, how in dag.divisions.items():
        teams = dag.replicas.groups(dag.places[region])
        if sorted(set(teams)) != sorted(how.groups):
            yield Problem(
                f"{region} is divided over {[list(group) for group in how.groups]}, which are not "
                f"at the same places of its `Place` as the groups of other regions",
                "write the devices of each stage in the same order, those of a group side by side, "
                "in rising order: Place(..., [0, 1, 2, 3]), Shard(..., [[0, 1], [2, 3]])",
            )
            return


def regions_beside_divided_ones_have_whole_teams(dag: Dag) -> Iterator[Problem]:
    """Each device of a team has a part of the work of a batch, also of regions beside these."""
    for row in dag.replicas.lists if dag.divisions else ():
        own, ways = distinct(row), dag.replicas.ways
        teams = {frozenset(team) for team in dag.replicas.groups(row)}
        if any(len(team) < ways for team in teams) or sum(map(len, teams)) > len(own):
            yield Problem(
                f"some regions are on {show(own)}, and groups of {ways} devices divide others; all "
                f"regions need {ways} devices, or a multiple of {ways}",
                f"place every region on {ways} different devices, or on {2 * ways}, {3 * ways}, "
                "...; write those of a group side by side",
            )
            return


def experts_of_a_team_take_parts_of_its_rows(dag: Dag) -> Iterator[Problem]:
    """Else every device of a team would compute all of them, and gradients would be counted twice.

    Gradients of parameters are then parts of a sum.
    """
    for region in dag.shardings if dag.divisions else ():
        for bucket in dag.model.by_id[region].buckets:
            if dag.model.buckets[bucket].placement is not Replicated:
                yield Problem(
                    f"{region} has experts, and computes all rows on every device of a team", BUG
                )


def cut_parameters_are_used_in_divided_regions(dag: Dag) -> Iterator[Problem]:
    for region in dag.model.regions:
        for bucket in region.buckets if region.ways == 1 else ():
            if dag.model.buckets[bucket].placement is Cut:
                other = dag.model.first_uses[bucket]
                names = ", ".join(p.name for p in dag.model.buckets[bucket].parameters)
                yield Problem(
                    f"{region.id} uses {names}, which {other} cuts",
                    f"let the `Shard` of {other} match {region.id}, too",
                )


def every_redistribution_fits_its_conversion(dag: Dag) -> Iterator[Problem]:
    """It reads and writes what the pass of its conversion does, in the right sizes and groups."""
    graphs = Graphs(dag)
    for node in dag.nodes.values():
        if isinstance(node, Redistribute):
            yield from misfits(dag, graphs, node)


def misfits(dag: Dag, graphs: Graphs, node: Redistribute) -> list[Problem]:
    region = dag.model.by_id[node.region]
    how, conversion = dag.divisions.get(region.id), region.conversion
    forward = node.phase is F
    step = conversion and (conversion.forward if forward else conversion.backward)
    along = how.axes[region.axis] if how else None
    if step is not node.step or along is None or (node.groups, node.stream) != (
        along.groups, along.stream,
    ):  # fmt: skip
        return [Problem(f"{node.id} is not the {step} of {region.id} in its groups", BUG)]
    if len(node.reads) != 1 or len(node.writes) != 1:
        what = f"{node.id} reads {len(node.reads)} values, writes {len(node.writes)}"
        return [Problem(what, BUG)]
    read = graphs.read(region, Argument.INPUT if forward else Argument.OUTPUT_GRAD, 0)
    write = next(graphs.writes(region, F if forward else B))
    found = [*read.misread(dag, node, node.reads[0]), *write.miswritten(dag, node, node.writes[0])]
    if not fits(dag, node):
        found.append(Problem(f"{node.id} changes the size of {node.writes[0]} wrongly", BUG))
    return found


def fits(dag: Dag, node: Redistribute) -> bool:
    """Whether what it writes has the size that its step makes of what it reads."""
    (old,), (new,) = (dag.values[v].specs for v in (node.reads[0][0], node.writes[0]))
    ways = len(node.groups[0])
    sizes = [prod(size or 0 for size in spec.shape) for spec in (old, new)]
    factor = {Step.ALL_GATHER: (ways, 1)}.get(node.step, (1, 1))
    factor = (1, ways) if node.step in (Step.REDUCE_SCATTER, Step.SLICE) else factor
    return old.dtype == new.dtype and sizes[0] * factor[0] == sizes[1] * factor[1]
