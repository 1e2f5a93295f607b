"""The passes, in order, on one screen; the DAG is checked after each."""

from __future__ import annotations

from collections.abc import Callable

from piper.costs import Costs
from piper.errors import PassError, Refused
from piper.ir.dag import Dag
from piper.ir.rules import CAPTURED, FINAL, GATHERED, LOWERABLE, PLACED, Rule, require
from piper.passes.exchanges import insert_exchanges
from piper.passes.gathers import place_gathers
from piper.passes.halves import cut_backwards
from piper.passes.homes import with_homes
from piper.passes.reductions import place_reductions
from piper.passes.schedule import expect_messages, schedule
from piper.passes.transfers import insert_transfers

Pass = Callable[[Dag], Dag]

Step = tuple[str, Pass, tuple[Rule, ...]]


def steps(costs: Costs) -> tuple[Step, ...]:
    """The passes, and the rules that hold after each."""
    return (
        ("strategy", lambda dag: dag, PLACED),
        ("homes", with_homes, ()),
        ("halves", cut_backwards, CAPTURED),
        ("exchanges", insert_exchanges, CAPTURED),
        ("reductions", place_reductions, CAPTURED),
        ("transfers", insert_transfers, LOWERABLE),
        ("schedule", lambda dag: schedule(dag, costs), ()),
        ("gathers", lambda dag: expect_messages(place_gathers(dag), costs), GATHERED),
        ("streams", lambda dag: dag, FINAL),
    )


def run_passes(dag: Dag, costs: Costs) -> Dag:
    """From what the user asked for to one order in time of everything that must be done."""
    for name, step, rules in steps(costs):
        try:
            dag = step(dag)
            require(dag, rules)
        except Refused as refused:
            raise PassError(name, *refused.problems) from None
    return dag
