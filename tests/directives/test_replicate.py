"""Replicate: how the replicas of regions share parameters, gradients and optimizer state."""

from __future__ import annotations

from collections import Counter

import pytest
from synthetic import chain

from piper.directives import Order, Place, Replicate, Split, Strategy, apply
from piper.errors import DirectiveError, PassError, Refused, StrategyError
from piper.ir.filters import where
from piper.ir.nodes import Collective
from piper.ir.training import training_dag
from piper.job.compile.compiler import compile_strategy

BOTH = [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])]


def collectives(*program: object, stages: int = 2) -> list[str]:
    dag = compile_strategy(chain(stages), program).dag
    found = [dag.nodes[name] for name in dag.sequence]
    return [node.id for node in found if isinstance(node, Collective)]


def kept(zero: int, **options: object) -> list[Replicate]:
    lists = {0: [0, 2], 1: [1, 3]}
    return [Replicate(where(PP=k), lists[k], zero=zero, **options) for k in lists]


def test_zero_0_is_one_all_reduce_per_bucket_and_step() -> None:
    found = collectives(*BOTH, *kept(0), Split("MB", 3))

    assert Counter(found) == Counter(["all-reduce R:PP0", "all-reduce R:PP1"])


def test_zero_1_reduces_and_gathers_once_per_step() -> None:
    found = collectives(*BOTH, *kept(1), Split("MB", 3))

    assert Counter(name.split()[0] for name in found) == {"reduce-scatter": 2, "all-gather": 2}


def test_zero_2_reduces_as_each_microbatch_produces_its_gradients() -> None:
    found = collectives(*BOTH, *kept(2), Split("MB", 3))

    assert [name for name in found if "S:PP1" in name] == [
        f"reduce-scatter S:PP1/PP1@{part}" for part in range(3)
    ]
    assert Counter(name.split()[0] for name in found) == {"reduce-scatter": 6, "all-gather": 2}


@pytest.mark.parametrize(("buffers", "gathers"), [(1, 4 + 3), (2, 4 + 2), (4, 4)])
def test_zero_3_gathers_what_no_buffer_holds(buffers: int, gathers: int) -> None:
    """Four regions forward, then backward: the last ones are still there."""
    keep = Replicate(where(), [0, 1], zero=3, gather_buffers=buffers, gather_ahead=0)

    found = collectives(Place(where(), [0, 1]), keep, stages=4)

    assert sum(name.startswith("all-gather") for name in found) == gathers


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_gathers_start_so_many_pieces_of_work_ahead(ahead: int) -> None:
    keep = Replicate(where(), [0, 1], zero=3, gather_buffers=3, gather_ahead=ahead)
    dag = compile_strategy(chain(3), [Place(where(), [0, 1]), keep]).dag
    order = list(dag.sequence)
    work = [name for name in order if name.startswith("PP") and not name.endswith(":U")]

    start = order.index("all-gather W:PP2*2")

    before = [name for name in order[start:] if name in work]
    assert before.index("PP2:F") == ahead


def test_it_may_come_before_place_and_after_split() -> None:
    late = collectives(*BOTH, Split("MB", 2), *kept(2))

    assert collectives(*kept(2), *BOTH, Split("MB", 2)) == late
    assert collectives(*BOTH, *kept(2), Split("MB", 2)) == late


def test_a_tied_bucket_belongs_to_the_replicate_of_its_first_region() -> None:
    program = [*BOTH, Replicate(where(PP=0), [0, 2], zero=2), Replicate(where(PP=1), [1, 3])]

    dag = apply(program, training_dag(chain(2, tied=True)))

    assert {bucket: how.zero for bucket, how in dag.residencies.items()} == {
        "PP0": 2, "tied": 2, "PP1": 0,
    }  # fmt: skip


def test_it_prints_as_it_was_written() -> None:
    assert str(Replicate(where(PP=0), [[0, 1], [2, 3]], zero=3)) == (
        "Replicate(filter=where(PP=0), devices=((0, 1), (2, 3)), zero=3, bucket_mb=25.0, "
        "reduce_stream='dp', gather_stream='dp', gather_ahead=1)"
    )


def test_json_gives_it_back() -> None:
    late = Replicate(where(PP=0), [0, 1], zero=3, reduce="once")
    groups = Replicate(where(), [[0, 1], [2, 3]], zero=1)
    strategy = Strategy([*kept(3, bucket_mb=1.5), groups, late])

    assert Strategy.from_json(strategy.to_json()) == strategy


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ('"reduce_stream": "r"', Replicate(where(PP=0), [0, 1], reduce_stream="r")),
        ('"shard_grads": true', Replicate(where(PP=0), [0, 1], zero=2)),
        (
            '"shard_grads": true, "shard_params": true, "bucket_size": 1000, "gather_stream": "g"',
            Replicate(where(PP=0), [0, 1], zero=3, bucket_mb=1000, gather_stream="g"),
        ),
        ('"shard_grads": false, "bucket_size": null', Replicate(where(PP=0), [0, 1])),
        (
            '"shard_grads": false, "shard_params": true',
            Replicate(where(PP=0), [0, 1], zero=3, reduce="once"),
        ),
        ('"prefetch_distance": 2', Replicate(where(PP=0), [0, 1], gather_ahead=2)),
    ],
)
def test_the_words_of_the_published_system_load(row: str, wanted: Replicate) -> None:
    text = f'[{{"op": "replicate", "filter": {{"PP": 0}}, "devices": [0, 1], {row}}}]'

    assert Strategy.from_json(text) == Strategy([wanted])


@pytest.mark.parametrize(("new", "value"), [("zero", "1"), ("reduce", '"once"')])
def test_two_ways_to_say_the_level_are_refused(new: str, value: str) -> None:
    said = f'"{new}": {value}, "shard_grads": true'
    row = f'{{"op": "replicate", "filter": {{}}, "devices": [0, 1], {said}}}'

    with pytest.raises(StrategyError) as refused:
        Strategy.from_json(f"[{row}]")

    assert str(refused.value) == (
        f"replicate (directive 1): {new} and shard_grads say the same thing\n  fix: keep only {new}"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"zero": 4},
            "zero=4 is not a ZeRO level\n  fix: write one of 0 (nothing is sharded), 1 (optimizer "
            "state is sharded), 2 (gradients too), 3 (parameters too)",
        ),
        (
            {"bucket_mb": 0},
            "bucket_mb=0 is not a message size\n  fix: write a number of megabytes above 0, such "
            "as 25; a larger parameter gets a message of its own",
        ),
        (
            {"reduce": "twice"},
            "reduce='twice' does not say when to reduce gradients\n"
            '  fix: write "each" (microbatch) or "once" (per step)',
        ),
        (
            {"zero": 1, "reduce": "each"},
            "zero=1 keeps whole gradients and reduces them once\n"
            '  fix: write zero=2, which shards gradients, or leave out reduce="each"',
        ),
        (
            {"zero": 2, "reduce": "once"},
            "zero=2 shards gradients, so it reduces each microbatch's\n"
            "  fix: write zero=1, which keeps whole gradients until they are reduced",
        ),
        (
            {"gather_buffers": 0},
            "gather_buffers=0 is not a valid count\n  fix: write a whole number, 1 or more",
        ),
        (
            {"gather_ahead": -1},
            "gather_ahead=-1 is not a valid count\n  fix: write a whole number, 0 or more",
        ),
        (
            {"reduce_stream": "compute"},
            "the stream 'compute' is reserved: Piper uses it itself\n"
            '  fix: choose another name, such as "dp"',
        ),
        (
            {"gather_stream": "loss_norm"},
            "the stream 'loss_norm' is reserved: Piper uses it itself\n"
            '  fix: choose another name, such as "dp"',
        ),
        ({"reduce_stream": 3}, 'stream 3 is not a name\n  fix: write reduce_stream="dp"'),
        (
            {"devices": [[0, 1], [2]]},
            "the groups [[0, 1], [2]] have different lengths or a device in common\n"
            "  fix: write groups such as [[0, 1], [2, 3]]",
        ),
        (
            {"devices": []},
            "devices [] is not a list of devices\n  fix: list each device once, such as [0, 2]",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(Refused) as refused:
        Replicate(where(), **{"devices": [0, 1], **options})

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            [*BOTH, Replicate(where(PP=0), [0, 1])],
            "replicate (directive 3 of 3): PP0 is placed on devices [0, 2], not on [0, 1]\n"
            "  fix: write devices=[0, 2], or place it on [0, 1]",
        ),
        (
            [*BOTH, *kept(0), Replicate(where(PP=1), [1, 3], zero=2)],
            "replicate (directive 5 of 5): PP1 is already replicated\n"
            "  fix: match each region with exactly one `Replicate`",
        ),
        (
            [*BOTH, Split("MB", 2), Replicate(where(PP=0, MB=0), [0, 2])],
            "replicate (directive 4 of 4): where(PP=0, MB=0) selects some of a region's work, but "
            "parameters "
            "serve all of it\n  fix: leave MB out of the filter",
        ),
        (
            [*BOTH, Replicate(where(PP=0, PASS="B"), [0, 2])],
            "replicate (directive 3 of 3): where(PP=0, PASS='B') selects some of a region's work, "
            "but "
            "parameters serve all of it\n  fix: leave PASS out of the filter",
        ),
        (
            [*BOTH, Replicate(where(PP=5), [0, 2])],
            "replicate (directive 3 of 3): where(PP=5) matches nothing\n"
            "  fix: choose from what exists: PP: 0, 1",
        ),
    ],
    ids=["elsewhere", "twice", "microbatch", "pass", "nothing"],
)
def test_a_replicate_that_does_not_fit_is_refused(program: list, message: str) -> None:
    with pytest.raises(DirectiveError) as refused:
        compile_strategy(chain(2), program)

    assert str(refused.value) == message


def test_devices_that_contradict_a_later_place_are_refused() -> None:
    program = [Replicate(where(), [0, 2]), Place(where(), [0, 1])]

    with pytest.raises(PassError) as refused:
        compile_strategy(chain(1), program)

    assert str(refused.value) == (
        "strategy: PP0 is placed on devices [0, 1], but replicated on devices [0, 2]\n"
        "  fix: write devices=[0, 1] in its `Replicate`"
    )


def test_a_split_backward_is_reduced_when_its_weight_gradients_are_there() -> None:
    slots = [where(MB=m, PASS=p) for p in ("F", "BI", "BW") for m in range(2)]
    keep = Replicate(where(), [0, 1], zero=2)

    dag = compile_strategy(
        chain(1), [Place(where(), [0, 1]), keep, Split("MB", 2), Order(slots)]
    ).dag

    order = list(dag.sequence)
    for part in range(2):
        assert order.index(f"reduce-scatter S:PP0/PP0@{part}") > order.index(f"PP0:BW@{part}")
