"""Split: a batch into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from piper.directives.base import Directive, directive
from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.naming import node_id, of_microbatch
from piper.ir.nodes import Compute, Node, Precedence, Sum
from piper.ir.values import OF_THE_STEP, Value
from piper.names import OF, PASS, F, ValueId

IN_BATCH_ORDER = Maker("buffers updated in batch order")


@directive(keys={"name": "dim_name", "n": "num_microbatches"}, constants={"filter": {}})
@dataclass(frozen=True, slots=True)
class Split(Directive):
    """Cut the batch into n microbatches of different data; gradients add up.

    rewrite:
        F -> B -> Update                       Split("MB", 2)
        -->
        F{MB=0} -> B{MB=0} -> Update
        F{MB=1} -> B{MB=1} -/                  Update reads the sum
    """

    name: str
    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            what = f"{self.n!r} is not a number of microbatches"
            raise Refused(Problem(what, "write a whole number, 1 or more"))
        named = isinstance(self.name, str) and self.name.isidentifier()
        if not named or self.name in (PASS, OF):
            fix = 'write Split("MB", n)'
            raise Refused(Problem(f"{self.name!r} cannot name a dimension", fix))

    def rewrite(self, dag: Dag) -> Dag:
        self.refuse_clashes(dag)
        parts = range(self.n)
        names = {v: [of_microbatch(v, k) for k in parts] for v in per_microbatch(dag)}
        copies = Copies(self.name, self.n, names)
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
        for node in dag.computes:
            if node.phase is F and dag.model.by_id[node.region].stateful:
                copies = [node_id(node.region, F, part) for part in range(self.n)]
                for before, after in pairwise(copies):
                    yield Precedence((before,), (after,), IN_BATCH_ORDER)


@dataclass(frozen=True, slots=True)
class Copies:
    """Nodes and values, once per microbatch. Names are made once, so equal ones are one object."""

    name: str
    n: int
    names: dict[ValueId, list[ValueId]]

    def values(self, value: ValueId, whole: Value) -> Iterator[tuple[ValueId, Value]]:
        if value not in self.names:
            yield value, whole
        else:
            yield from ((name, whole.of(k, self.n)) for k, name in enumerate(self.names[value]))

    def nodes(self, node: Node) -> Iterator[Node]:
        """One copy of a compute node per microbatch; any other node reads the sum over them."""
        if isinstance(node, Compute):
            return (self.copy(node, part) for part in range(self.n))
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
        return tuple(chain.from_iterable(self.names.get(value, [value]) for value in total))


def per_microbatch(dag: Dag) -> list[ValueId]:
    """Values that each microbatch has its own of: all but parameters, old and new, and totals."""
    return [name for name, value in dag.values.items() if value.role not in OF_THE_STEP]
