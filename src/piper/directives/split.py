"""Split: a batch into microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from piper.directives.arguments import MOST_PARTS, Live
from piper.directives.base import Directive, directive
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.microbatch_sizes import with_sizes
from piper.ir.model import Model
from piper.ir.naming import node_id, of_microbatch
from piper.ir.nodes import Compute, Node, Precedence, Sum
from piper.ir.training import microbatches_of_values
from piper.ir.values import OF_THE_STEP, Value
from piper.names import OF, PASS, STEP, F, ValueId, amount

WHOLE = "write a whole number, 1 or more"

IN_BATCH_ORDER = Maker("buffers updated in batch order")


@directive(
    keys={"name": "dim_name", "n": "num_microbatches"},
    constants={"filter": {}},
    omit_defaults=("sizes", "replica_sizes"),
    example='Split("MB", 4)',
)
@dataclass(frozen=True, slots=True)
class Split(Directive):
    """Cut the batch into n microbatches of different data; gradients add up.

    `sizes` says how many rows each has, up to a common factor. Without it, they have equally many,
    or the first ones one more. `replica_sizes` says how many rows the batch of each replica has, up
    to a common factor. Without it, all have equally many.

    rewrite:
        F -> B -> Update                       Split("MB", 2)
        -->
        F{MB=0} -> B{MB=0} -> Update
        F{MB=1} -> B{MB=1} -/                  Update reads the sum
    """

    name: str
    n: int
    sizes: Live = None
    replica_sizes: Live = None

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            what = f"{self.n!r} is not a number of microbatches"
            swapped = isinstance(self.n, str) and type(self.name) is int
            fix = f"write Split({self.n!r}, {self.name})" if swapped else WHOLE
            raise Refused(Problem(what, fix))
        if self.n > MOST_PARTS:
            raise Refused(Problem("too many microbatches", f"write {MOST_PARTS:,} or less"))
        named = isinstance(self.name, str) and self.name.isidentifier()
        if not named or self.name in (PASS, OF, STEP):
            fix = 'write Split("MB", n)'
            raise Refused(Problem(f"{self.name!r} cannot name a dimension", fix))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", row_counts(self.sizes, self.n))
        if self.replica_sizes is not None:
            object.__setattr__(self, "replica_sizes", replica_counts(self.replica_sizes))

    def rows(self, whole: int) -> tuple[int, ...]:
        """The rows of each microbatch of a batch; empty if all have equally many.

        >>> Split("MB", 4).rows(10), Split("MB", 2).rows(10), Split("MB", 2, [3, 2]).rows(10)
        ((3, 3, 2, 2), (), (6, 4))
        """
        found = self.all_rows(whole)
        return found if len(set(found)) > 1 else ()

    def all_rows(self, whole: int) -> tuple[int, ...]:
        """The same, also if all have equally many."""
        if self.sizes is None:
            each, more = divmod(whole, self.n)
            found = tuple(each + (k < more) for k in range(self.n))
        else:
            found = tuple(size * whole // sum(self.sizes) for size in self.sizes)
        if not all(found) or sum(found) != whole:
            raise Refused(self.wrong_batch(whole))
        return found

    @property
    def unequal(self) -> tuple[int, ...]:
        """The sizes of replicas, if they differ."""
        found = tuple(self.replica_sizes or ())
        return found if len(set(found)) > 1 else ()

    def wrong_batch(self, whole: int) -> Problem:
        count = amount(whole, "row")
        if self.sizes is None:
            what = f"it has {count}, too few for {amount(self.n, 'microbatch', 'microbatches')}"
            return Problem(what, f"use a batch of at least {amount(self.n, 'row')}")
        what = f"it has {count}, which cannot be cut into microbatches of sizes {list(self.sizes)}"
        return Problem(what, f"use a batch of {sum(self.sizes)} rows, or a multiple of it")

    def rewrite(self, dag: Dag) -> Dag:
        self.refuse_clashes(dag)
        if self.sizes is not None and (len(set(self.sizes)) > 1 or dag.model.size_names):
            dag = with_sizes(dag, tuple(self.sizes))
        parts = range(self.n)
        names = {v: [of_microbatch(v, k) for k in parts] for v in per_microbatch(dag)}
        copies = Copies(self.name, self.n, names, dag.model, microbatches_of_values(dag.model))
        values = dict(chain.from_iterable(copies.values(v, k) for v, k in dag.values.items()))
        nodes = chain.from_iterable(copies.nodes(node) for node in dag.nodes.values())
        split = replace(
            dag,
            nodes={node.id: node for node in nodes},
            values=values,
            makers={},
            dimensions=(*dag.dimensions, (self.name, self.n)),
        )
        return split.with_precedences(self.state_order(dag))

    def refuse_clashes(self, dag: Dag) -> None:
        if dag.dimensions:
            fix = "write one `Split` with the total number of microbatches"
            raise Refused(Problem(f"the batch is already split, as {dag.dimensions[0][0]}", fix))
        if dag.precedences or dag.message_orders:
            what = "an `Order` before it names passes of the whole batch"
            raise Refused(Problem(what, "put the `Split` before every `Order`"))
        if self.name in dag.tag_names:
            fix = 'choose another name, such as "MB"'
            raise Refused(Problem(f"{self.name} is already a tag of the model", fix))

    def state_order(self, dag: Dag) -> Iterator[Precedence]:
        """Regions that update buffers see their microbatches in order, as a plain loop would."""
        for region in dag.model.regions:
            if region.stateful and region.twin is None:
                copies = [
                    (part, one.id) for one in dag.model.regions if region.id in (one.id, one.twin)
                    for part in dag.model.microbatches(one, self.n)
                ]  # fmt: skip
                names = (node_id(one, F, part) for part, one in sorted(copies))
                for before, after in pairwise(names):
                    yield Precedence((before,), (after,), IN_BATCH_ORDER)


@dataclass(frozen=True, slots=True)
class Copies:
    """Nodes and values, once per microbatch. Names are made once, so equal ones are one object."""

    name: str
    n: int
    names: dict[ValueId, list[ValueId]]
    model: Model
    some: dict[ValueId, Sequence[int]]  # the microbatches of each value, where not all have it

    def values(self, value: ValueId, whole: Value) -> Iterator[tuple[ValueId, Value]]:
        if value not in self.names:
            yield value, whole
        elif not self.some:
            yield from ((name, whole.of(k, self.n)) for k, name in enumerate(self.names[value]))
        else:
            names, sizes = self.names[value], self.model.sizes
            parts = self.some.get(value, range(self.n))
            yield from ((names[k], whole.of(k, self.n, sizes)) for k in parts)

    def nodes(self, node: Node) -> Iterator[Node]:
        """One copy of a compute node per microbatch; any other node reads the sum over them."""
        if isinstance(node, Compute):
            parts = self.model.microbatches(self.model.by_id[node.region], self.n)
            return (self.copy(node, part) for part in parts)
        return iter((replace(node, reads=tuple(map(self.over_all, node.reads))),))

    def copy(self, node: Compute, part: int) -> Compute:
        names = self.names
        return Compute(
            id=node_id(node.region, node.phase, part), region=node.region, phase=node.phase,
            microbatch=part, tags=(*node.tags, (self.name, part)),
            reads=tuple(
                [tuple([names[v][part] if v in names else v for v in s]) for s in node.reads]
            ),
            writes=tuple([names[value][part] for value in node.writes]),
            devices=node.devices, stream=node.stream,
        )  # fmt: skip

    def over_all(self, total: Sum) -> Sum:
        if self.some:
            return tuple(chain.from_iterable(map(self.of_some, total)))
        return tuple(chain.from_iterable(self.names.get(value, [value]) for value in total))

    def of_some(self, value: ValueId) -> list[ValueId]:
        """A value of each microbatch that has it."""
        names = self.names.get(value)
        if names is None:
            return [value]
        return [names[k] for k in self.some.get(value, range(self.n))]


def per_microbatch(dag: Dag) -> list[ValueId]:
    """Values that each microbatch has its own of: all but parameters, old and new, and totals."""
    return [name for name, value in dag.values.items() if value.role not in OF_THE_STEP]


def replica_counts(sizes: object) -> tuple[int, ...]:
    """What a user wrote, checked."""
    found = tuple(sizes) if isinstance(sizes, list | tuple) else ()
    if not found or any(type(one) is not int or one < 1 for one in found):
        what = f"replica_sizes={sizes!r} does not say how many rows each replica has"
        raise Refused(Problem(what, "write a whole number, 1 or more, for each replica"))
    return found


def row_counts(sizes: object, n: int) -> tuple[int, ...]:
    """What a user wrote, checked."""
    found = tuple(sizes) if isinstance(sizes, list | tuple) else ()
    if len(found) != n or any(type(one) is not int or one < 1 for one in found):
        what = f"sizes={sizes!r} does not say how many rows each of {n} microbatches has"
        raise Refused(Problem(what, f"write {n} whole numbers, 1 or more"))
    return found
