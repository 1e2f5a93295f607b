"""Microbatches of different sizes: the regions of a model once for each size.

Graphs are made for one size. A microbatch of another size passes through regions of its own, which
use the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.maker import CAPTURED
from piper.ir.model import Model, Region
from piper.ir.naming import node_id, region_of_size, value_of_size
from piper.ir.nodes import Compute, Node, Sum, Totals, Update
from piper.ir.training import all_values, backward_node, contributions, forward_node, updates
from piper.ir.values import Role
from piper.names import BucketId, F, RegionId, ValueId

Key = TypeVar("Key")
Kept = TypeVar("Kept")
OF_ANY_SIZE = (Role.RANDOM, Role.RANK)


def with_sizes(dag: Dag, sizes: tuple[int, ...]) -> Dag:
    """The DAG of a batch that is to be split into microbatches of these sizes.

    rewrite:
        F -> B -> Update                       sizes 3, 3, 2
        -->
        F   -> B   -> Update                   for microbatches of 3 rows
        F|2 -> B|2 -/                          for those of 2 rows
    """
    model = replace(dag.model, sizes=sizes)
    (first, rows), *others = dict(zip(model.named_sizes, sizes, strict=True)).items()
    regions = tuple(region.named(rows=rows, size=first) for region in model.regions)
    model = replace(model, regions=regions)
    dag = replace(dag, model=model)
    for name, rows in others:
        dag = with_twins(dag, model, twins(model, name, rows), name)
    return dag


def twins(model: Model, size: int, rows: int) -> Model:
    """The model for microbatches of another size, under names of its own."""
    other = model if rows == model.sizes[0] else model.others.get(rows)
    if other is None:
        what = f"the model was captured for microbatches of {model.sizes[0]} rows, not of {rows}"
        raise Refused(Problem(what, "let a Trainer capture it, or use microbatches of one size"))
    if other.by_id.keys() != model.by_id.keys() or other.buckets != model.buckets:
        what = f"microbatches of {model.sizes[0]} and of {rows} rows run different regions"
        raise Refused(
            Problem(what, "use microbatches of one size: a batch that their number divides")
        )
    names = dict(value_names(other, size))
    how = Twins(names, size, rows)
    regions = tuple(how.of(model.by_id[region.id], region) for region in other.regions)
    values = {names[name]: value for name, value in other.values.items()}
    return replace(other, regions=regions, values=values, others={}, sizes=())


def value_names(model: Model, size: int) -> Iterator[tuple[ValueId, ValueId]]:
    """Losses, and what does not depend on the size, keep their names."""
    for name, value in model.values.items():
        same = name == model.loss or value.role in OF_ANY_SIZE
        yield name, name if same else value_of_size(name, size)


@dataclass(frozen=True)
class Twins:
    """How regions are named for microbatches of another size."""

    names: Mapping[ValueId, ValueId]
    size: int
    rows: int

    def of(self, main: Region, other: Region) -> Region:
        """A region as directives have left its main one."""
        how = main.recomputes
        if how is not None and not how.auto and other.recomputes is None:
            other = other.recomputed[how.keep]
        found = self.named(main, other)
        if how is not None and how.auto:
            found = replace(found, recomputes=how)
        known = other.recomputed.items()
        return replace(found, recomputed={keep: self.named(main, one) for keep, one in known})

    def named(self, main: Region, other: Region) -> Region:
        return replace(
            other, id=region_of_size(main.id, self.size), tags=main.tags, run=main.run,
            twin=main.id, rows=self.rows, size=self.size,
            inputs=tuple(self.names[value] for value in other.inputs),
            outputs=tuple(self.names[value] for value in other.outputs),
        )  # fmt: skip


def with_twins(dag: Dag, main: Model, other: Model, size: int) -> Dag:
    """The DAG with the nodes of these regions, on the devices of their main ones."""
    twin_of = {region.id: region_of_size(region.id, size) for region in main.regions}
    new = [like(dag, node, other.by_id[node.region].twin) for node in passes(other)]
    totals = {step.bucket: step.reads[0] for step in updates(other, clip=False)}
    regions, values = (*dag.model.regions, *other.regions), {**other.values, **dag.model.values}
    return replace(
        dag,
        model=replace(dag.model, regions=regions, values=values),
        nodes={node.id: node for node in in_order([*dag.nodes.values(), *new], totals)},
        values={**all_values(other), **dag.values},
        makers={**dag.makers, **dict.fromkeys((node.id for node in new), CAPTURED)},
        replicated=(*dag.replicated, *(twin_of[r] for r in dag.replicated if r in twin_of)),
        shardings=for_both(dag.shardings, twin_of),
        divisions=for_both(dag.divisions, twin_of),
        offloads=for_both(
            dag.offloads,
            {(what, r): (what, twin_of[r]) for what, r in dag.offloads if r in twin_of},
        ),
    )


def for_both(found: Mapping[Key, Kept], twin_of: Mapping[Key, Key]) -> dict[Key, Kept]:
    """What directives say of a region holds for its twin."""
    return {**found, **{twin_of[key]: how for key, how in found.items() if key in twin_of}}


def passes(model: Model) -> Iterator[Compute]:
    grads = contributions(model)
    yield from map(forward_node, model.regions)
    backward = (backward_node(model, region, grads) for region in reversed(model.regions))
    yield from (node for node in backward if node is not None)


def like(dag: Dag, node: Compute, main: RegionId | None) -> Compute:
    """A node on the devices of the same pass of the main region."""
    assert main is not None
    other = dag.nodes[node_id(main, node.phase)]
    assert isinstance(other, Compute)
    return replace(node, devices=other.devices, stream=other.stream)


def in_order(nodes: Sequence[Node], more: Mapping[BucketId, Sum]) -> Iterator[Node]:
    """Forwards, backwards, then the rest, which adds up the gradients of all sizes."""
    runs = [node for node in nodes if isinstance(node, Compute)]
    yield from sorted(runs, key=lambda node: node.phase is not F)
    longer: dict[Sum, Sum] = {}
    for node in nodes:
        if isinstance(node, Update):
            total = node.reads[0]
            longer[total] = (*total, *more.get(node.bucket, ()))
            yield replace(node, reads=(longer[total], *node.reads[1:]))
    for node in nodes:
        if isinstance(node, Totals):
            yield replace(node, reads=tuple(longer.get(total, total) for total in node.reads))
