"""Apply a list of directives, check the DAG after each step, and sign the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from piper.directives.base import Batched, Directive
from piper.errors import DirectiveError, Refused
from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.rules import CAPTURED, require

Named = tuple[Maker, Directive]


def apply(program: Sequence[Directive], dag: Dag, upto: int | None = None) -> Dag:
    """Each directive rewrites the DAG that the directives before it made.

    A run of directives of one kind is applied as a batch and checked once. Only if that fails are
    they checked one by one, to name the one at fault. With `upto`, only so many are applied.
    """
    require(dag, CAPTURED)
    for batch in batches(program, upto):
        try:
            after = rewrite(batch, dag)
            require(after, CAPTURED)
        except Refused as refused:
            blame(batch, dag)
            raise DirectiveError(str(batch[-1][0]), *refused.problems) from None
        dag = stamped(after, dag, batch[0][0])
    return dag


def batches(program: Sequence[Directive], upto: int | None = None) -> Iterator[list[Named]]:
    total = len(program)
    named = [
        (Maker(type(directive).__name__.lower(), step, total), directive)
        for step, directive in enumerate(program, start=1)
    ]
    for _, group in groupby(named[:upto], key=lambda pair: type(pair[1])):
        yield list(group)


def rewrite(batch: Sequence[Named], dag: Dag) -> Dag:
    _, first = batch[0]
    if isinstance(first, Batched):
        return first.rewrite_all(batch, dag)
    for _, directive in batch:
        dag = directive.rewrite(dag)
    return dag


def blame(batch: Sequence[Named], dag: Dag) -> None:
    """Replay a failed batch step by step, so that the error names the right directive."""
    for name, directive in batch:
        try:
            dag = rewrite([(name, directive)], dag)
            require(dag, CAPTURED)
        except Refused as refused:
            raise DirectiveError(str(name), *refused.problems) from None


def stamped(dag: Dag, before: Dag, name: Maker) -> Dag:
    """Every node that was not there before carries the name of its maker."""
    if dag.nodes.keys() == before.makers.keys():
        return dag
    return dag.signed({node: before.makers.get(node, name) for node in dag.nodes})
