"""Split: the batch in microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.nodes import Compute, Node, Precedence, Sum
from piper.ir.values import Origin
from piper.names import PASS, F, NodeId, ValueId


@dataclass(frozen=True, slots=True)
class Split:
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
            raise Refused(
                Problem(f"Split into {self.n!r} parts", "split into 1 or more microbatches")
            )
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name == PASS:
            raise Refused(Problem(f"{self.name!r} cannot name a dimension", 'write Split("MB", n)'))

    def rewrite(self, dag: Dag) -> Dag:
        self.refuse_clashes(dag)
        copied = per_microbatch(dag)
        values = dict(dag.values)
        for value in dag.values:
            if value in copied:
                whole = values.pop(value)
                values.update((self.at(value, k), whole.of(k, self.n)) for k in range(self.n))
        nodes = chain.from_iterable(self.copies(node, copied) for node in dag.nodes.values())
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
            raise Refused(
                Problem(
                    f"the batch is split already, as {dag.dimensions[0][0]}",
                    "write one `Split` with the total number of microbatches",
                )
            )
        if dag.precedences:
            raise Refused(
                Problem(
                    "an order names passes of the whole batch, which this would take apart",
                    "put the `Split` before every `Order`",
                )
            )
        if self.name in dag.tag_names:
            raise Refused(
                Problem(f"{self.name} names regions of the model", 'choose another, like "MB"')
            )

    def at(self, name: str, part: int) -> ValueId:
        return ValueId(f"{name}@{part}")

    def copies(self, node: Node, copied: set[ValueId]) -> Iterator[Node]:
        if isinstance(node, Compute):
            for part in range(self.n):
                yield self.copy(node, copied, part)
        else:
            yield replace(node, reads=tuple(self.every(total, copied) for total in node.reads))

    def copy(self, node: Compute, copied: set[ValueId], part: int) -> Compute:
        def mine(value: ValueId) -> ValueId:
            return ValueId(f"{value}@{part}") if value in copied else value

        return Compute(
            id=NodeId(self.at(node.id, part)), region=node.region, phase=node.phase,
            tags=(*node.tags, (self.name, part)),
            reads=tuple([tuple(map(mine, total)) for total in node.reads]),
            writes=tuple(map(mine, node.writes)),
            devices=node.devices, stream=node.stream,
        )  # fmt: skip

    def every(self, total: Sum, copied: set[ValueId]) -> Sum:
        """The sum over all microbatches of what was a sum for one."""
        return tuple(
            chain.from_iterable(
                [self.at(value, part) for part in range(self.n)] if value in copied else [value]
                for value in total
            )
        )

    def state_order(self, dag: Dag) -> Iterator[Precedence]:
        """Regions that update buffers see their microbatches in order, as a plain loop would."""
        for node in dag.computes:
            if node.phase is F and dag.model.by_id[node.region].stateful:
                copies = [NodeId(self.at(node.id, part)) for part in range(self.n)]
                for before, after in pairwise(copies):
                    yield Precedence((before,), (after,), "buffers updated in batch order")


def per_microbatch(dag: Dag) -> set[ValueId]:
    """Values that each microbatch has its own of: all but parameters, old and new."""
    kept = {v for n in dag.nodes.values() if not isinstance(n, Compute) for v in n.writes}
    kept |= {v for v, value in dag.values.items() if value.origin is Origin.WEIGHTS}
    return set(dag.values) - kept
