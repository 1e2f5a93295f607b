"""Replicas with different numbers of rows: one DAG for each number, the same but for sizes.

Graphs are made for one size. A replica with other rows runs the same nodes in the same order, so
that all replicas meet at the same points. What differs are the graphs and the sizes of its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from piper.costs import Costs
from piper.directives import Directive, Replicate, Split, apply
from piper.directives.replicate import BUFFERS
from piper.errors import Problem, Refused, StrategyError
from piper.ir.dag import Dag
from piper.ir.model import Model
from piper.ir.training import training_dag
from piper.names import amount
from piper.passes.pass_pipeline import run_passes

SAME = "give all replicas equally many rows"


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """A model and a program for replicas with so many rows."""

    rows: int
    model: Model
    program: tuple[Directive, ...]


def scheduled_dag(model: Model, program: Sequence[Directive], clip: bool, costs: Costs) -> Dag:
    """The DAG of a step, with those of replicas with other numbers of rows."""
    split = next((one for one in program if isinstance(one, Split)), None)
    if split is None or not split.unequal:
        return run_passes(apply(program, training_dag(model, clip)), costs)
    first, *others = kinds(model, program, split)
    dag = run_passes(apply(first.program, training_dag(first.model, clip)), costs)
    refuse_wrong_count(dag, split)
    found = {first.rows: dag}
    for kind in others:
        other = run_passes(apply(kind.program, training_dag(kind.model, clip)), costs, like=dag)
        found[kind.rows] = with_order_of(dag, other)
    return replace(dag, others=by_device(dag, split.unequal, found))


def kinds(model: Model, program: Sequence[Directive], split: Split) -> Iterator[ReplicaKind]:
    """The first replica's, then those of every other number of rows."""
    sizes = {rows: split.all_rows(rows) for rows in split.unequal}
    names = size_names(list(sizes.values()))
    models = {sizes[split.unequal[0]][0]: model, **model.others}
    for rows, own in sizes.items():
        found = replace(of_rows(models, own[0], model), size_names=names)
        here = replace(split, sizes=own, replica_sizes=None)
        made = tuple(here if one is split else with_fixed_buffers(one) for one in program)
        yield ReplicaKind(rows, found, made)


def with_fixed_buffers(directive: Directive) -> Directive:
    """Where memory is free depends on rows, and what is gathered when must not."""
    if isinstance(directive, Replicate) and directive.zero == 3 and not directive.gather_buffers:
        return replace(directive, gather_buffers=BUFFERS)
    return directive


def of_rows(models: Mapping[int, Model], rows: int, first: Model) -> Model:
    """The model for microbatches of so many rows."""
    found = models.get(rows)
    if found is None:
        what = f"the model was not captured for microbatches of {amount(rows, 'row')}"
        raise Refused(Problem(what, "let a Trainer capture it, or " + SAME))
    if found.by_id.keys() != first.by_id.keys() or found.buckets != first.buckets:
        what = f"microbatches of {amount(rows, 'row')} run other regions than those of replica 0"
        raise Refused(Problem(what, SAME))
    return replace(found, others=dict(models))


def size_names(sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """A name for the size of each microbatch, the same in all replicas: the rows that it has in the
    first one, if these tell all sizes apart.

    >>> size_names([(2, 1), (3, 2)]), size_names([(2, 2), (2, 1)])
    ((2, 1), (0, 1))
    """
    columns = list(zip(*sizes, strict=True))
    different = list(dict.fromkeys(columns))
    if len({rows for rows, *_ in different}) == len(different):
        return tuple(rows for rows, *_ in columns)
    return tuple(map(different.index, columns))


def with_order_of(first: Dag, other: Dag) -> Dag:
    """The other DAG, which must have the same nodes in the same order."""
    if first.nodes != other.nodes or first.sequence != other.sequence:
        what = "replicas with different numbers of rows would not do the same in the same order"
        raise Refused(Problem(what, SAME))
    return replace(other, times=first.times, transits=first.transits)


def by_device(dag: Dag, rows: Sequence[int], found: Mapping[int, Dag]) -> dict[int, Dag]:
    """The DAG of each device whose replica has not as many rows as the first."""
    feeds = ((device, rows[dag.replicas.feed(device)]) for device in dag.devices)
    return {device: found[own] for device, own in feeds if own != rows[0]}


def refuse_wrong_count(dag: Dag, split: Split) -> None:
    count = len(dag.replicas.feeds)
    if len(split.unequal) != count:
        what = f"replica_sizes has {amount(len(split.unequal), 'number')}"
        fix = f"write one for each of {amount(count, 'batch', 'batches')}: those that share devices"
        raise StrategyError.of("split", f"{what} for {amount(count, 'batch', 'batches')}", fix)
