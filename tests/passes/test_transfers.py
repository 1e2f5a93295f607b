"""Transfers: a value goes where it is read, once per destination."""

from __future__ import annotations

from collections.abc import Sequence

from synthetic import chain, frozen

from piper.directives import Directive, Place, Split, apply
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.model import Model
from piper.ir.nodes import Transfer
from piper.ir.rules import LOWERABLE, require
from piper.ir.training import training_dag
from piper.passes.bucket_homes import with_homes
from piper.passes.transfers import insert_transfers


def transferred(model: Model, devices: Sequence[int | list[int]], *more: Directive) -> Dag:
    lists = [[one] if isinstance(one, int) else one for one in devices]
    places = [Place(where(PP=k), where_to, stream=f"s{k}") for k, where_to in enumerate(lists)]
    dag = insert_transfers(with_homes(apply([*places, *more], training_dag(model))))
    require(dag, LOWERABLE)
    return dag


def wires(dag: Dag) -> list[str]:
    """One line per transfer: what, from where to where, on which stream."""
    found = [node for node in dag.nodes.values() if isinstance(node, Transfer)]
    return [
        f"{' + '.join(node.reads[0])}: {show(node.source)} => {show(node.devices)} on {node.stream}"
        for node in found
    ]


def show(devices: tuple[int, ...]) -> str:
    return ",".join(map(str, devices))


def test_nothing_is_sent_on_one_device() -> None:
    dag = transferred(chain(3, skips=((0, 2),), tied=True), [0, 0, 0])

    assert wires(dag) == []


def test_activations_go_forward_and_gradients_back() -> None:
    dag = transferred(chain(2), [0, 1])

    assert wires(dag) == ["h0: 0 => 1 on s0", "d:h0/PP1: 1 => 0 on s1"]
    assert dag.nodes["PP1:F"].reads == (("w:PP1",), ("h0>1",), ("y",))
    assert dag.nodes["PP0:B"].reads[-1] == ("d:h0/PP1>0",)


def test_a_value_is_sent_once_to_a_device_that_reads_it_in_forward_and_backward() -> None:
    dag = transferred(chain(2), [0, 1])

    readers = dag.consumers["h0>1"]

    assert readers == ["PP1:F", "PP1:B"]


def test_a_value_that_skips_regions_goes_straight_to_its_reader() -> None:
    dag = transferred(chain(4, skips=((0, 3),)), [0, 1, 2, 3])

    assert wires(dag) == [
        "h0: 0 => 1 on s0",
        "h1: 1 => 2 on s1",
        "h2: 2 => 3 on s2",
        "h0: 0 => 3 on s0",
        "d:h2/PP3: 3 => 2 on s3",
        "d:h1/PP2: 2 => 1 on s2",
        "d:h0/PP3: 3 => 0 on s3",
        "d:h0/PP1: 1 => 0 on s1",
    ]


def test_two_readers_on_one_device_share_a_transfer() -> None:
    dag = transferred(chain(3, skips=((0, 2),)), [0, 1, 1])

    assert wires(dag) == ["h0: 0 => 1 on s0", "d:h0/PP2 + d:h0/PP1: 1 => 0 on s2"]


def test_a_gradient_is_added_up_where_its_parts_are_before_it_is_sent() -> None:
    dag = transferred(chain(4, skips=((0, 2), (0, 3))), [0, 1, 1, 2])

    assert "d:h0/PP2 + d:h0/PP1: 1 => 0 on s2" in wires(dag)
    assert "d:h0/PP3: 2 => 0 on s3" in wires(dag)
    assert len(dag.nodes["PP0:B"].reads[-1]) == 2


def test_a_skip_back_to_the_same_device_is_not_sent() -> None:
    dag = transferred(chain(3, skips=((0, 2),)), [0, 1, 0])

    assert wires(dag) == [
        "h0: 0 => 1 on s0",
        "h1: 1 => 0 on s1",
        "d:h1/PP2: 0 => 1 on s2",
        "d:h0/PP1: 1 => 0 on s1",
    ]


def test_every_microbatch_has_transfers_of_its_own() -> None:
    dag = transferred(chain(2), [0, 1], Split("MB", 2))

    assert wires(dag) == [
        "h0@0: 0 => 1 on s0",
        "h0@1: 0 => 1 on s0",
        "d:h0/PP1@0: 1 => 0 on s1",
        "d:h0/PP1@1: 1 => 0 on s1",
    ]


def test_inputs_are_taken_where_they_are_used() -> None:
    dag = transferred(chain(3), [0, 1, 2])

    reads = {total for node in dag.computes for total in node.reads}

    assert ("x",) in reads
    assert ("y",) in reads
    assert ("seed",) in reads


def test_a_region_lives_where_it_runs_and_is_updated_there() -> None:
    dag = transferred(chain(2), [3, 5])

    assert dag.nodes["PP0:U"].devices == (3,)
    assert dag.nodes["PP1:U"].devices == (5,)


def test_tied_gradients_travel_home_once_per_step_and_new_weights_travel_back() -> None:
    dag = transferred(chain(3, tied=True), [0, 1, 2], Split("MB", 4))

    tied = [wire for wire in wires(dag) if "tied" in wire]

    parts = " + ".join(f"g:tied/PP2@{k}" for k in range(4))
    assert tied == [f"{parts}: 2 => 0 on s2", "w:tied': 0 => 2 on weights"]
    assert dag.nodes["tied:U"].devices == (0,)
    assert dag.nodes["PP2:F@0"].reads[1] == ("w:tied>2",)
    assert dag.nodes["PP0:F@0"].reads[1] == ("w:tied",)


def test_tied_weights_on_one_device_are_kept_once() -> None:
    dag = transferred(chain(3, tied=True), [0, 1, 0])

    assert not any("tied" in wire for wire in wires(dag))


def test_frozen_tied_weights_are_copied_and_never_sent() -> None:
    dag = transferred(frozen(chain(3, tied=True)), [0, 1, 2])

    assert not any("tied" in wire for wire in wires(dag))
    assert dag.nodes["PP2:F"].reads[1] == ("w:tied>2",)


def test_replica_i_sends_to_replica_i() -> None:
    dag = transferred(frozen(chain(2)), [[0, 2], [1, 3]])

    assert wires(dag) == ["h0: 0,2 => 1,3 on s0", "d:h0/PP1: 1,3 => 0,2 on s1"]


def test_the_dag_before_stays_as_it_was() -> None:
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]
    before = with_homes(apply(places, training_dag(chain(2))))
    nodes = dict(before.nodes)

    insert_transfers(before)

    assert before.nodes == nodes
