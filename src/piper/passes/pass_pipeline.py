"""All passes in order. The DAG is checked after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from piper.costs import Costs
from piper.errors import DirectiveError, PassError, Refused
from piper.ir.dag import Dag
from piper.ir.rules import (
    CAPTURED,
    FINAL,
    GATHERED,
    LOWERABLE,
    OFFLOADED,
    ORDERED,
    PLACED,
    Rule,
    require,
)
from piper.passes.bucket_homes import with_homes
from piper.passes.conversions import insert_redistributions
from piper.passes.gathers import place_gathers
from piper.passes.host_copies import offload_activations
from piper.passes.offloaded_optimizer import offload_optimizer
from piper.passes.offloaded_parameters import offload_parameters
from piper.passes.orders.message_orders import place_message_orders
from piper.passes.reductions import place_reductions
from piper.passes.replica_lists import with_equal_lists
from piper.passes.schedule import expect_messages, schedule
from piper.passes.split_backwards import split_backwards
from piper.passes.token_all_to_all import insert_token_all_to_all
from piper.passes.transfers import insert_transfers

Pass = Callable[[Dag], Dag]

Step = tuple[str, Pass, tuple[Rule, ...]]


def steps(costs: Costs, like: Dag | None = None) -> tuple[Step, ...]:
    """The passes, and the rules that hold after each. `like`: a DAG with the order to keep."""
    return (
        ("strategy", with_equal_lists, PLACED),
        ("bucket homes", with_homes, ()),
        ("split backwards", split_backwards, CAPTURED),
        ("token all-to-all", insert_token_all_to_all, CAPTURED),
        ("conversions", insert_redistributions, CAPTURED),
        ("reductions", place_reductions, CAPTURED),
        ("transfers", insert_transfers, LOWERABLE),
        ("message orders", place_message_orders, ORDERED),
        ("schedule", lambda dag: schedule(dag, costs) if like is None else in_order(dag, like), ()),
        ("gathers", lambda dag: expect_messages(place_gathers(dag), costs), GATHERED),
        ("offload", offload, OFFLOADED),
        ("streams", lambda dag: dag, FINAL),
    )


def offload(dag: Dag) -> Dag:
    return offload_optimizer(offload_parameters(offload_activations(dag)))


def in_order(dag: Dag, like: Dag) -> Dag:
    """The order of another DAG, which may have more nodes: those of later passes."""
    return dag.known_to(replace(dag, sequence=tuple(n for n in like.sequence if n in dag.nodes)))


def run_passes(dag: Dag, costs: Costs, like: Dag | None = None) -> Dag:
    """From what the user asked for to one order in time of everything that must be done.

    `like`: the same DAG for other sizes, whose order is taken.
    """
    for name, step, rules in steps(costs, like):
        try:
            dag = step(dag)
            require(dag, rules)
        except DirectiveError:
            raise  # it knows the directive
        except Refused as refused:
            raise PassError(name, *refused.problems) from None
    return dag
