"""The order in time that is chosen where nobody has ordered."""

from __future__ import annotations

from itertools import accumulate, groupby
from itertools import chain as joined
from random import Random

import pytest
from draws import drawn, draws, one_of
from hypothesis import given, settings
from plan.programs import Program, programs
from synthetic import chain, network

from piper.directives import Order, Place, Split
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.nodes import Compute
from piper.job.compile.compiler import Compiled, compile_strategy


def pipeline(stages: int, microbatches: int) -> Compiled:
    places = [Place(where(PP=s), [s]) for s in range(stages)]
    return compile_strategy(chain(stages), [*places, Split("MB", microbatches)])


def row(dag: Dag, device: int) -> str:
    """What a device computes, in order: F0 F1 B0 ..."""
    nodes = [dag.nodes[name] for name in dag.sequence]
    return " ".join(
        f"{node.phase}{dict(node.tags)['MB']}"
        for node in nodes
        if isinstance(node, Compute) and node.devices == (device,)
    )


def peak(dag: Dag, stage: int) -> int:
    """The most microbatches between their forward and the end of their backward."""
    nodes = [dag.nodes[name] for name in dag.sequence]
    mine = [n for n in nodes if isinstance(n, Compute) and n.region == f"PP{stage}"]
    return max(accumulate({"F": 1, "B": -1, "BI": 0, "BW": -1}[node.phase] for node in mine))


def is_legal(dag: Dag) -> bool:
    """Every node once, after all it reads and all that an order puts before it."""
    when = {name: k for k, name in enumerate(dag.sequence)}
    data = [(p, node.id) for node in dag.nodes.values() for p in dag.predecessors(node)]
    asked = [(a, b) for p in dag.precedences for a in p.before for b in p.after]
    return (
        len(dag.sequence) == len(when) == len(dag.nodes)
        and set(when) == set(dag.nodes)
        and all(when[a] < when[b] for a, b in joined(data, asked))
    )


def test_a_pipeline_without_an_order_is_1f1b() -> None:
    dag = pipeline(stages=3, microbatches=4).dag

    rows = [row(dag, device) for device in range(3)]

    assert rows == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (2, 9), (4, 6), (5, 16)])
def test_a_stage_holds_no_more_microbatches_than_there_are_stages_from_it_on(
    stages: int, microbatches: int
) -> None:
    dag = pipeline(stages, microbatches).dag

    peaks = [peak(dag, stage) for stage in range(stages)]

    assert peaks == [min(stages - stage, microbatches) for stage in range(stages)]


def test_microbatches_go_through_in_order() -> None:
    dag = pipeline(stages=4, microbatches=7).dag

    for device in range(4):
        ran = sorted(row(dag, device).split(), key=lambda name: name[0])
        numbers = [[int(n[1:]) for n in group] for _, group in groupby(ran, key=lambda n: n[0])]
        assert numbers == [list(range(7))] * 2


@drawn
@settings(max_examples=draws(20, 240))
@given(programs())
def test_every_schedule_is_legal(program: Program) -> None:
    dag = compile_strategy(program.model, program.directives).dag

    assert is_legal(dag)


@one_of(3)
@pytest.mark.parametrize("seed", range(10))
def test_any_network_is_scheduled_without_an_order(seed: int) -> None:
    random = Random(seed)
    places = [Place(where(PP=s), [random.randrange(3)]) for s in range(8)]

    dag = compile_strategy(network(random, 8), [*places, Split("MB", 4)]).dag

    assert is_legal(dag)


def test_an_order_is_followed_even_if_it_holds_more_in_flight() -> None:
    slots = [where(PP=0, MB=m, PASS=p) for p in ("F", "B") for m in range(6)]
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]

    dag = compile_strategy(chain(2), [*places, Split("MB", 6), Order(slots)]).dag

    assert row(dag, 0) == "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5"
    assert is_legal(dag)


def test_a_limit_gives_way_to_the_order_of_another_device() -> None:
    """Device 1 wants all forwards first; device 0 alone would hold two microbatches only."""
    slots = [where(PP=1, MB=m, PASS=p) for p in ("F", "B") for m in range(6)]
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]

    dag = compile_strategy(chain(2), [*places, Split("MB", 6), Order(slots)]).dag

    assert row(dag, 1) == "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5"
    assert is_legal(dag)


def test_what_shares_a_slot_is_ordered_by_the_dataflow() -> None:
    slot = [where(PP=0, MB=0, PASS="B"), where(PP=0, MB=0, PASS="F")]

    dag = compile_strategy(chain(1), [Place(where(), [0]), Split("MB", 1), Order([slot])]).dag

    assert row(dag, 0) == "F0 B0"
