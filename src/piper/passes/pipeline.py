"""The passes, in order, on one screen; the DAG is checked after each."""

from __future__ import annotations

from collections.abc import Callable

from piper.errors import PassError, Refused
from piper.ir.dag import Dag
from piper.ir.spec import LOWERABLE, PLACED, Rule, require
from piper.passes.schedule import schedule
from piper.passes.transfers import insert_transfers

Pass = Callable[[Dag], Dag]


def run_passes(dag: Dag) -> Dag:
    """From what the user asked for to one order in time of everything that must be done."""
    steps: tuple[tuple[str, Pass, tuple[Rule, ...]], ...] = (
        ("strategy", lambda dag: dag, PLACED),
        ("transfers", insert_transfers, LOWERABLE),
        ("schedule", schedule, ()),
    )
    for name, step, rules in steps:
        try:
            dag = step(dag)
            require(dag, rules)
        except Refused as refused:
            raise PassError(name, *refused.problems) from None
    return dag
