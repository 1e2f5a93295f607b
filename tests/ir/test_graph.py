"""Who waits for whom: cycles are found and drawn, lanes join devices that run one list."""

from dataclasses import replace

import pytest
from synthetic import chain

from piper.ir.cycles import cycle
from piper.ir.dag import Dag
from piper.ir.maker import Maker
from piper.ir.nodes import Precedence
from piper.ir.rules.flow import nothing_waits_for_itself
from piper.ir.training import training_dag
from piper.names import NodeId


def ordered(dag: Dag, *pairs: tuple[str, str], maker: str = "order") -> Dag:
    return dag.with_precedences(
        Precedence(tuple(map(NodeId, a.split())), tuple(map(NodeId, b.split())), Maker(maker))
        for a, b in pairs
    )


def on(dag: Dag, **devices: tuple[int, ...]) -> Dag:
    return dag.with_nodes(replace(n, devices=devices[n.region]) for n in dag.computes)


def test_a_dag_without_orders_has_no_cycle() -> None:
    dag = training_dag(chain(3, skips=((0, 2),)))

    loop = cycle(dag)

    assert loop == []
    assert dag.topology.stuck == set()


def test_an_order_along_the_dataflow_makes_no_cycle() -> None:
    dag = ordered(training_dag(chain(3)), ("PP0:F", "PP2:F PP2:B"), ("PP1:B", "PP0:B"))

    loop = cycle(dag)

    assert loop == []


def test_a_cycle_is_drawn_with_the_reason_of_each_wait() -> None:
    dag = ordered(training_dag(chain(2)), ("PP0:B", "PP1:F"), maker="order (directive 3 of 3)")

    (problem,) = nothing_waits_for_itself(dag)

    assert problem.what.splitlines()[0] == "these wait for each other"
    assert sorted(problem.what.splitlines()[1:]) == [
        "    PP0:B -> PP1:F   order (directive 3 of 3)",
        "    PP1:B -> PP0:B   data flow",
        "    PP1:F -> PP1:B   data flow",
    ]
    assert problem.fix == "let the order put PP0:B after what it needs, or in the same slot"


def test_a_cycle_of_orders_alone_is_drawn() -> None:
    dag = ordered(training_dag(chain(2)), ("PP0:U", "PP1:U"), maker="one")
    dag = ordered(dag, ("PP1:U", "PP0:U"), maker="other")

    loop = cycle(dag)

    assert sorted(loop) == [("PP0:U", "one"), ("PP1:U", "other")]


def test_a_node_that_precedes_itself_is_a_cycle() -> None:
    dag = ordered(training_dag(chain(1)), ("PP0:F", "PP0:F"))

    loop = cycle(dag)

    assert loop == [("PP0:F", "order")]


def test_what_is_only_behind_a_cycle_is_not_drawn() -> None:
    dag = ordered(training_dag(chain(3)), ("PP1:B", "PP1:F"))

    drawn = {node for node, _ in cycle(dag)}

    assert drawn <= {"PP1:F", "PP2:F", "PP2:B", "PP1:B"}
    assert len(dag.topology.stuck) > len(drawn)


def test_every_arrow_of_a_drawn_cycle_is_a_wait() -> None:
    dag = ordered(training_dag(chain(5)), ("PP0:F PP0:B", "PP3:F PP4:F"), ("PP4:B", "PP1:F"))

    loop = cycle(dag)

    graph = dag.topology
    number = {node: k for k, node in enumerate(graph.ids)}
    for (here, _), (following, _) in zip(loop, [*loop[1:], loop[0]], strict=True):
        direct = graph.successors[number[here]]
        through = [k for j in direct if j >= len(graph.ids) for k in graph.successors[j]]
        assert number[following] in (*direct, *through)


def test_precedences_between_groups_cost_their_length() -> None:
    group = " ".join(f"PP{k}:F" for k in range(50))
    other = " ".join(f"PP{k}:B" for k in range(50))

    dag = training_dag(chain(50))
    edges = sum(map(len, dag.topology.successors))
    more = sum(map(len, ordered(dag, (group, other)).topology.successors))

    assert more - edges == 100


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ((0,), (1,), False),
        ((0,), (0,), True),
        ((0, 2), (1, 3), False),
        ((0, 1), (1, 0), True),
        ((0, 1), (1, 2), True),
    ],
)
def test_device_lists_that_share_a_device_are_one_lane(
    first: tuple[int, ...], second: tuple[int, ...], together: bool
) -> None:
    dag = on(training_dag(chain(2)), PP0=first, PP1=second)

    table = dag.lanes

    assert (table[first] == table[second]) is together


def test_lanes_join_through_a_third_list() -> None:
    dag = on(training_dag(chain(3)), PP0=(0, 1), PP1=(2, 3), PP2=(1, 2))

    table = dag.lanes

    assert len(set(table.values())) == 1
