"""The DAG as a value: queries do not change it, changes give another one."""

from dataclasses import replace

from synthetic import chain

from piper.ir.filters import where
from piper.ir.maker import Maker
from piper.ir.nodes import Precedence
from piper.ir.training import training_dag
from piper.names import NodeId


def test_an_index_groups_nodes_by_the_keys_asked_for() -> None:
    dag = training_dag(chain(2))

    index = dag.index(("PP", "PASS"))

    assert {key: [node.id for node in nodes] for key, nodes in index.items()} == {
        (0, "F"): ["PP0:F"],
        (1, "F"): ["PP1:F"],
        (1, "B"): ["PP1:B"],
        (0, "B"): ["PP0:B"],
    }


def test_an_index_is_built_once() -> None:
    dag = training_dag(chain(2))

    index = dag.index(("PP",))

    assert dag.index(("PP",)) is index


def test_what_select_returns_may_be_changed_without_harm() -> None:
    dag = training_dag(chain(2))

    dag.select(where(PP=0)).clear()

    assert [node.id for node in dag.select(where(PP=0))] == ["PP0:F", "PP0:B"]


def test_producers_and_consumers_are_the_two_ends_of_data_edges() -> None:
    dag = training_dag(chain(2))

    h0, weights = dag.producers["h0"], dag.consumers["w:PP1"]

    assert h0 == "PP0:F"
    assert dag.consumers["h0"] == ["PP1:F", "PP1:B"]
    assert weights == ["PP1:F", "PP1:B"]
    assert "w:PP1" not in dag.producers


def test_changed_nodes_keep_their_place_and_new_ones_come_last() -> None:
    dag = training_dag(chain(2))
    changed = replace(dag.nodes["PP0:F"], devices=(3,))
    new = replace(dag.nodes["PP0:F"], id=NodeId("new"))

    after = dag.with_nodes([new, changed])

    assert [*after.nodes] == [*dag.nodes, "new"]
    assert after.nodes["PP0:F"].devices == (3,)
    assert dag.nodes["PP0:F"].devices is None


def test_a_precedence_is_kept_once() -> None:
    dag = training_dag(chain(1))
    order = Precedence((NodeId("PP0:F"),), (NodeId("PP0:B"),), Maker("a test"))

    after = dag.with_precedences([order]).with_precedences([order])

    assert after.precedences == (order,)


def test_queries_see_the_dag_they_are_asked_of() -> None:
    dag = training_dag(chain(2))
    dag.select(where(PP=0)), dag.producers, dag.devices, dag.tag_names

    after = dag.with_nodes([replace(dag.nodes["PP0:F"], devices=(3,))])

    assert after.devices == (3,)
    assert after.select(where(PP=0))[0].devices == (3,)
    assert dag.devices == ()
