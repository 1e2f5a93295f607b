"""From regions to a training DAG."""

from dataclasses import replace

from synthetic import chain

from piper.ir.model import Model
from piper.ir.nodes import Compute, Update
from piper.ir.rules import CAPTURED, require
from piper.ir.training import split_backward, training_dag


def picture(model: Model) -> list[str]:
    """One line per node: what it reads and writes."""
    return [
        f"{node.id}: {', '.join(map('+'.join, node.reads))} -> {', '.join(node.writes)}"
        for node in training_dag(model).nodes.values()
    ]


def test_a_chain_goes_forward_back_and_is_updated() -> None:
    drawn = picture(chain(2))

    assert drawn == [
        "PP0:F: w:PP0, x -> h0, saved:PP0",
        "PP1:F: w:PP1, h0, y -> loss, saved:PP1",
        "PP1:B: w:PP1, h0, y, saved:PP1, seed -> d:h0/PP1, g:PP1/PP1",
        "PP0:B: w:PP0, x, saved:PP0, d:h0/PP1 -> g:PP0/PP0",
        "PP0:U: g:PP0/PP0 -> w:PP0'",
        "PP1:U: g:PP1/PP1 -> w:PP1'",
        "totals: loss, g:PP0/PP0, g:PP1/PP1 -> totals",
    ]


def test_a_value_used_twice_gets_the_sum_of_two_gradients() -> None:
    drawn = picture(chain(3, skips=((0, 2),)))

    assert "PP2:B: w:PP2, h1, h0, y, saved:PP2, seed -> d:h1/PP2, d:h0/PP2, g:PP2/PP2" in drawn
    assert "PP0:B: w:PP0, x, saved:PP0, d:h0/PP2+d:h0/PP1 -> g:PP0/PP0" in drawn


def test_tied_parameters_are_updated_once_by_the_sum_over_their_uses() -> None:
    drawn = picture(chain(3, tied=True))

    assert "tied:U: g:tied/PP2+g:tied/PP0 -> w:tied'" in drawn
    assert sum(":U" in line for line in drawn) == 4


def test_frozen_parameters_have_neither_gradient_nor_update() -> None:
    model = chain(2)
    buckets = {**model.buckets, "PP0": replace(model.buckets["PP0"], trainable=False)}

    drawn = picture(replace(model, buckets=buckets))

    assert "PP0:B: w:PP0, x, saved:PP0, d:h0/PP1 -> " in drawn
    assert not any(line.startswith("PP0:U") for line in drawn)


def test_a_region_without_gradients_has_no_backward() -> None:
    model = chain(2)
    first = replace(model.regions[0], has_backward=False)
    second = replace(model.regions[1], input_grads=())

    drawn = picture(replace(model, regions=(first, second)))

    assert drawn == [
        "PP0:F: w:PP0, x -> h0",
        "PP1:F: w:PP1, h0, y -> loss, saved:PP1",
        "PP1:B: w:PP1, h0, y, saved:PP1, seed -> g:PP1/PP1",
        "PP1:U: g:PP1/PP1 -> w:PP1'",
        "totals: loss, g:PP1/PP1 -> totals",
    ]


def test_clipped_updates_read_the_totals() -> None:
    dag = training_dag(chain(1), clip=True)

    update = dag.nodes["PP0:U"]

    assert update.reads == (("g:PP0/PP0",), ("totals",))


def test_every_made_up_model_gives_a_valid_dag() -> None:
    models = [chain(1), chain(5), chain(5, skips=((0, 2), (0, 4), (1, 3))), chain(4, tied=True)]

    dags = [training_dag(model) for model in models]

    for dag in dags:
        require(dag, CAPTURED)


def test_a_split_backward_reads_and_writes_what_the_whole_one_does() -> None:
    dag = training_dag(chain(2, tied=True))
    whole = dag.nodes["PP1:B"]
    assert isinstance(whole, Compute)

    bi, bw = split_backward(dag, whole)

    assert (bi.id, bw.id) == ("PP1:BI", "PP1:BW")
    assert bi.reads == whole.reads
    assert bi.writes == ("d:h0/PP1", "carry:PP1")
    assert bw.reads == (("h0",), ("carry:PP1",), ("seed",))
    assert bw.writes == ("g:PP1/PP1", "g:tied/PP1")


def test_updates_write_new_weights_of_the_same_shape() -> None:
    dag = training_dag(chain(1))

    update = dag.nodes["PP0:U"]

    assert isinstance(update, Update)
    assert dag.values["w:PP0'"].specs == dag.values["w:PP0"].specs
