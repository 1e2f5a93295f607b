"""Split: the batch in microbatches."""

from dataclasses import replace

import pytest
from synthetic import chain

from piper.directives import Order, Place, Split, apply
from piper.errors import DirectiveError, Refused
from piper.ir.filters import where
from piper.ir.maker import Maker
from piper.ir.training import training_dag


def test_every_pass_is_copied_and_the_update_reads_the_sum() -> None:
    dag = training_dag(chain(1))

    after = apply([Split("MB", 2)], dag)

    assert [*after.nodes] == ["PP0:F@0", "PP0:F@1", "PP0:B@0", "PP0:B@1", "PP0:U", "totals"]
    assert after.nodes["PP0:U"].reads == (("g:PP0/PP0@0", "g:PP0/PP0@1"),)
    assert after.nodes["totals"].reads == (("loss@0", "loss@1"), ("g:PP0/PP0@0", "g:PP0/PP0@1"))
    assert after.nodes["PP0:B@1"].tags == (("PP", 0), ("MB", 1))
    assert after.dimensions == (("MB", 2),)


def test_microbatches_read_different_data_and_the_same_weights() -> None:
    dag = training_dag(chain(1))

    after = apply([Split("MB", 3)], dag)

    assert after.nodes["PP0:F@2"].reads == (("w:PP0",), ("x@2",), ("y@2",))
    parts = [(after.values[f"x@{k}"].part, after.values[f"x@{k}"].parts) for k in range(3)]
    assert parts == [(0, 3), (1, 3), (2, 3)]
    assert [after.values[f"seed@{k}"].part for k in range(3)] == [0, 1, 2]
    assert "x" not in after.values


def test_microbatches_do_not_wait_for_each_other() -> None:
    dag = training_dag(chain(3, skips=((0, 2),)))

    after = apply([Split("MB", 2)], dag)

    for node in after.computes:
        part = node.id.partition("@")[2]
        assert {before.partition("@")[2] for before in after.predecessors(node)} <= {part}
    assert after.precedences == ()


def test_a_gradient_of_two_uses_stays_a_sum_within_its_microbatch() -> None:
    dag = training_dag(chain(3, skips=((0, 2),)))

    after = apply([Split("MB", 2)], dag)

    assert after.nodes["PP0:B@1"].reads[-1] == ("d:h0/PP2@1", "d:h0/PP1@1")


def test_one_microbatch_can_be_named() -> None:
    dag = training_dag(chain(1))

    after = apply([Split("MB", 1), Place(where(MB=0), [0])], dag)

    assert [node.id for node in after.computes] == ["PP0:F@0", "PP0:B@0"]


def test_regions_that_update_buffers_see_microbatches_in_order() -> None:
    model = chain(2)
    stateful = replace(model, regions=(replace(model.regions[0], stateful=True), model.regions[1]))

    after = apply([Split("MB", 3)], training_dag(stateful))

    assert [(p.before, p.after, str(p.maker)) for p in after.precedences] == [
        (("PP0:F@0",), ("PP0:F@1",), "buffers updated in batch order"),
        (("PP0:F@1",), ("PP0:F@2",), "buffers updated in batch order"),
    ]


def test_new_nodes_are_signed() -> None:
    dag = training_dag(chain(1))

    after = apply([Place(where(), [0]), Split("MB", 2)], dag)

    assert after.makers["PP0:F@1"] == Maker("split", 2, 2)
    assert after.makers["PP0:U"] == Maker("capture")


@pytest.mark.parametrize(
    ("name", "n", "message"),
    [
        (
            "MB",
            10**400,
            "too many microbatches\n  fix: write 1,000,000 or less",
        ),
        ("MB", 0, "0 is not a number of microbatches\n  fix: write a whole number, 1 or more"),
        ("MB", -2, "-2 is not a number of microbatches\n  fix: write a whole number, 1 or more"),
        ("MB", "4", "'4' is not a number of microbatches\n  fix: write a whole number, 1 or more"),
        ("MB", 2.0, "2.0 is not a number of microbatches\n  fix: write a whole number, 1 or more"),
        (
            "MB",
            True,
            "True is not a number of microbatches\n  fix: write a whole number, 1 or more",
        ),
        ("PASS", 2, "'PASS' cannot name a dimension\n  fix: write Split(\"MB\", n)"),
        ("", 2, "'' cannot name a dimension\n  fix: write Split(\"MB\", n)"),
        ("m b", 2, "'m b' cannot name a dimension\n  fix: write Split(\"MB\", n)"),
        (3, 2, '3 cannot name a dimension\n  fix: write Split("MB", n)'),
    ],
    ids=str,
)
def test_a_split_that_makes_no_sense_is_refused_at_once(name: str, n: int, message: str) -> None:
    with pytest.raises(Refused) as refused:
        Split(name, n)

    assert str(refused.value) == message


def test_a_second_split_is_refused() -> None:
    with pytest.raises(DirectiveError) as refused:
        apply([Split("MB", 2), Split("MC", 2)], training_dag(chain(1)))

    assert str(refused.value) == (
        "split (directive 2 of 2): the batch is already split, as MB\n"
        "  fix: write one `Split` with the total number of microbatches"
    )


def test_a_split_that_is_called_like_a_region_is_refused() -> None:
    with pytest.raises(DirectiveError) as refused:
        apply([Split("PP", 2)], training_dag(chain(1)))

    assert str(refused.value) == (
        "split (directive 1 of 1): PP is already a tag of the model\n"
        '  fix: choose another name, such as "MB"'
    )


def test_a_split_after_an_order_is_refused() -> None:
    order = Order([[where(PP=0, PASS="F")], [where(PP=0, PASS="B")]])

    with pytest.raises(DirectiveError) as refused:
        apply([Place(where(), [0]), order, Split("MB", 2)], training_dag(chain(1)))

    assert refused.value.where == "split (directive 3 of 3)"
    assert "`Split`" in refused.value.problems[0].fix
    assert "`Order`" in refused.value.problems[0].fix
