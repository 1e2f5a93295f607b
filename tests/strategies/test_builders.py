"""Strategies: schedules as directives, and back."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import run
from time import process_time
from typing import Any

import pytest
import torch
from strategies.tables import every_schedule, table
from synthetic import chain

import piper.strategies
from piper.directives import (
    Directive,
    Order,
    Place,
    Remat,
    Replicate,
    Shard,
    Split,
    Stage,
    Strategy,
    apply,
)
from piper.directives.strategy import as_strategy
from piper.errors import StrategyError
from piper.ir.filters import Filter, where
from piper.ir.training import training_dag
from piper.strategies import (
    BUILDERS,
    dualpipe,
    dualpipev,
    from_csv,
    from_orders,
    from_table,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    schedules,
    to_csv,
    to_directives,
    to_table,
)
from piper.strategies.recomputed_stages import RematOption
from piper.strategies.schedules.table import ranks_of

SMALL = {name: build(pp=2, microbatches=4) for name, build in BUILDERS.items()}


def devices(strategy: Strategy) -> dict[Filter, tuple[int, ...]]:
    return {d.filter: d.devices for d in strategy if isinstance(d, Place)}


def test_a_schedule_is_a_place_per_stage_a_split_and_an_order_per_rank() -> None:
    strategy = gpipe(pp=2, microbatches=1, stream="mine")

    assert strategy == Strategy(
        [
            Stage("PP", 2),
            Place(where(PP=0), devices=(0,), stream="mine"),
            Place(where(PP=1), devices=(1,), stream="mine"),
            Split("MB", 1),
            Order(((where(PP=0, MB=0, PASS="F"),), (where(PP=0, MB=0, PASS="B"),))),
            Order(((where(PP=1, MB=0, PASS="F"),), (where(PP=1, MB=0, PASS="B"),))),
        ]
    )


def test_what_overlaps_shares_a_slot() -> None:
    orders = [d for d in dualpipev(pp=1, microbatches=2) if isinstance(d, Order)]

    assert (where(PP=1, MB=1, PASS="F"), where(PP=0, MB=0, PASS="B")) in orders[0].slots


def test_directives_print_as_a_user_writes_them() -> None:
    assert (
        str(SMALL["zb-h1"])
        .splitlines()[4]
        .endswith("(where(PP=0, MB=3, PASS='BI'),), (where(PP=0, MB=3, PASS='BW'),)))")
    )


def test_interleaved_stages_go_round_the_devices() -> None:
    placed = devices(interleaved_one_f_one_b(pp=3, microbatches=3, virtual=3))

    assert placed == {where(PP=stage): (stage % 3,) for stage in range(9)}


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_shaped_stages_go_down_the_devices_and_back(name: str) -> None:
    placed = devices(BUILDERS[name](pp=3, microbatches=6))

    assert placed == {where(PP=stage): (min(stage, 5 - stage),) for stage in range(6)}


def test_dualpipe_places_two_replicas_in_opposite_order() -> None:
    strategy = dualpipe(pp=4, microbatches=4)

    assert devices(strategy) == {where(PP=stage): (stage, 3 - stage) for stage in range(4)}
    assert sum(isinstance(directive, Order) for directive in strategy) == 2


def test_replicas_are_a_matter_of_places() -> None:
    directives = to_directives(schedules.gpipe(2, 1), {0: (0, 2), 1: [1, 3]})

    assert devices(Strategy(directives)) == {where(PP=0): (0, 2), where(PP=1): (1, 3)}


@pytest.mark.parametrize("strategy", SMALL.values(), ids=SMALL)
def test_a_strategy_gives_back_its_table_and_its_json(strategy: Strategy) -> None:
    again = Strategy.from_json(strategy.to_json())

    assert again == strategy
    without = tuple(d for d in strategy.directives if not isinstance(d, Replicate))
    assert to_directives(to_table(again), places(again)) == without


@pytest.mark.parametrize("name", BUILDERS)
def test_every_strategy_fits_a_model_with_its_stages(name: str) -> None:
    strategy = BUILDERS[name](pp=4, microbatches=8)
    whole = training_dag(chain(len(devices(strategy))))

    dag = apply(strategy.directives, whole)

    assert len({(node.tags, node.phase) for node in dag.computes}) == len(dag.computes)
    assert len(dag.computes) == len(list(to_table(strategy).actions))


def places(strategy: Strategy) -> dict[int, tuple[int, ...]]:
    return dict(enumerate(devices(strategy).values()))


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 2), (2, 4), (3, 6)])
def test_every_schedule_survives_the_way_through_text(pp: int, microbatches: int) -> None:
    for schedule in every_schedule(pp, microbatches):
        assert to_table(from_csv(to_csv(from_table(schedule)))) == schedule


def test_a_users_csv_places_each_stage_where_its_row_is() -> None:
    strategy = from_csv("0F0,2F0,2B0,,0B0\n,1F0,,1B0\n")

    assert devices(strategy) == {where(PP=0): (0,), where(PP=1): (1,), where(PP=2): (0,)}


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "dualpipe"])
def test_a_table_and_orders_take_the_options_of_a_builder(name: str) -> None:
    options = {"dp": 2, "zero": 3, "ep": 2, "memory_gib": 100, "ahead": True, "stream": "p2p"}
    built = BUILDERS[name](pp=2, microbatches=4, **options)
    orders = [one for one in built if isinstance(one, Order)]

    assert from_csv(to_csv(built), **options) == built
    assert from_table(to_table(built), **options) == built
    assert from_orders(orders, **options) == built


def test_orders_of_ones_own_stay_as_they_are_written() -> None:
    order = Order([[where(PP=0, MB=0, PASS="F"), where(PP=0, MB=0, PASS="B")]], overlap=False)

    assert list(from_orders([order], dp=2))[-1] is order
    assert from_orders(order) == from_orders([order])
    assert from_orders([order.slots]) == from_orders([replace(order, overlap=True)])


def test_an_order_of_half_a_name_is_told_the_whole_one() -> None:
    with pytest.raises(StrategyError, match='write where\\(PP=1, MB=0, PASS="B"\\)'):
        from_orders([[where(PP=1, PASS="B")]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Place(where(), [0]), "no list of directives"),
        ([torch.zeros(999)], "a value of type Tensor is not a directive"),
        ([3], "3 is not a directive"),
    ],
)
def test_what_is_no_strategy_is_refused_in_one_line(given: Any, said: str) -> None:
    with pytest.raises(StrategyError, match=said) as refused:
        as_strategy(given)
    assert len(str(refused.value)) < 250


def test_orders_that_name_no_single_pass_have_no_table() -> None:
    with pytest.raises(StrategyError) as refused:
        from_orders([Order([where(PP=0, MB=[0, 1], PASS="F")])])
    assert str(refused.value) == (
        "order 1 of 1: where(PP=0, MB=[0, 1], PASS='F') is not one pass of one stage on one "
        'microbatch, as a schedule needs\n  fix: write where(PP=0, MB=0, PASS="F")'
    )

    with pytest.raises(StrategyError, match=r'write where\(PP=3, MB=1, PASS="BI"\)'):
        from_orders([Order([where(P=3, MB=1, PASS="BI")])])
    with pytest.raises(StrategyError, match="a schedule has no option zreo"):
        from_csv("0F0,0B0", zreo=3)  # type: ignore[call-arg]


def test_a_limit_of_memory_knows_the_schedule_and_the_zero_level() -> None:
    (stage, *_) = BUILDERS["zbv"](pp=2, microbatches=8, dp=4, zero=2, memory_gib=100)

    assert stage == Stage("PP", 4, live=(4, 3, 2, 1), memory_gib=50, state=1 + 3 / 4)


def test_a_csv_that_is_no_schedule_is_refused() -> None:
    with pytest.raises(StrategyError) as refused:
        from_csv("0F0,0B0\n1F0")

    assert str(refused.value) == (
        "schedule: the backward of 1F0 is missing\n  fix: add 1B0, or 1BI0 and 1BW0"
    )


ONE_STAGE: list[Directive] = [Place(where(PP=0), devices=(5, 7)), Split("MICRO", 1)]


def test_any_devices_and_any_name_of_the_split_make_a_table() -> None:
    slots = ((where(PASS="F", MICRO=0, PP=0),), (where(PP=0, MICRO=0, PASS="B"),))

    assert to_table(Strategy([*ONE_STAGE, Order(slots)])) == table("0F0 0B0")


def test_one_order_may_speak_for_several_devices() -> None:
    two: list[Directive] = [Place(where(PP=s), devices=(1 - s,)) for s in range(2)]
    passes = [(0, "F"), (1, "F"), (1, "B"), (0, "B")]
    order = Order(tuple((where(PP=s, MB=0, PASS=p),) for s, p in passes))

    found = to_table(Strategy([*two, Split("MB", 1), order]))

    assert found == table("1F0 1B0", "0F0 0B0")
    assert ranks_of(found) == {0: 1, 1: 0}


FORWARD, BACKWARD = where(PP=0, MICRO=0, PASS="F"), where(PP=0, MICRO=0, PASS="B")
REFUSED: list[tuple[str, list[Directive], str]] = [
    (
        "no order",
        ONE_STAGE,
        "strategy: it has no Order, so it has no schedule to show\n"
        "  fix: add one Order per device, or start from a schedule such as piper.strategies.gpipe",
    ),
    (
        "a filter that is not an action",
        [*ONE_STAGE, Order(((where(PP=0, MICRO="*", PASS="F"),), (where(EP=0),)))],
        "order (directive 3 of 3): where(PP=0, MICRO='*', PASS='F') is not one pass of one stage "
        "on one microbatch, as a schedule needs (nor are 1 more)\n"
        '  fix: write where(PP=0, MICRO=0, PASS="F")',
    ),
    (
        "a stage without a place",
        [*ONE_STAGE, Order(((where(PP=3, MICRO=0, PASS="F"),),))],
        "order (directive 3 of 3): stage 3 has no device\n"
        "  fix: add Place(where(PP=3), devices=[...])",
    ),
    (
        "two orders for one device",
        [*ONE_STAGE, Order(((FORWARD,),)), Order(((BACKWARD,),))],
        "order (directive 4 of 4): device 5 already has an order, and nothing orders "
        "the two\n  fix: write both as one Order",
    ),
    (
        "an order that leaves work out",
        [*ONE_STAGE, Order(((FORWARD,),))],
        "schedule: the backward of 0F0 is missing\n  fix: add 0B0, or 0BI0 and 0BW0",
    ),
]


@pytest.mark.parametrize(("directives", "message"), [case[1:] for case in REFUSED])
def test_orders_that_are_no_pipeline_are_refused(directives: list[Directive], message: str) -> None:
    with pytest.raises(StrategyError) as refused:
        to_table(Strategy(directives))

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("remat", "directives"),
    [
        (False, []),
        (True, [Remat(where())]),
        ("attention", [Remat(where(), keep="attention")]),
        (["matmuls", "attention"], [Remat(where(), keep=["matmuls", "attention"])]),
        (0.25, [Remat(where(), keep=0.25)]),
        ("auto", [Remat(where(), keep="auto")]),
        ([1, 0], [Remat(where(PP=1)), Remat(where(PP=0))]),
    ],
)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_recomputes_on_request(
    name: str, remat: RematOption, directives: list[Directive]
) -> None:
    plain = BUILDERS[name](pp=2, microbatches=4)
    found = BUILDERS[name](pp=2, microbatches=4, remat=remat)

    assert [one for one in found if isinstance(one, Remat)] == directives
    assert [one for one in found if not isinstance(one, Remat)] == list(plain)


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (
            [2],
            "strategy: remat=[2] has stage 2, but the schedule has 2\n"
            "  fix: list stages from 0 to 1",
        ),
        (
            "all",
            "strategy: remat='all' is not something that can be kept\n"
            '  fix: write "costly", "matmuls", "attention", "topk", a list of these, a share such '
            'as 0.5, or "auto"; True recomputes everything, [0, 1] only these stages',
        ),
    ],
)
def test_what_cannot_be_recomputed(remat: RematOption, message: str) -> None:
    with pytest.raises(StrategyError) as refused:
        gpipe(pp=2, microbatches=2, remat=remat)

    assert str(refused.value) == message


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", BUILDERS)
def test_an_option_that_no_schedule_has_is_refused(name: str, dp: int) -> None:
    with pytest.raises(StrategyError) as error:
        BUILDERS[name](pp=2, microbatches=4, dp=dp, zreo=3)

    assert str(error.value) == "strategy: a schedule has no option zreo\n  fix: write zero=..."


def test_a_misspelled_option_of_some_schedules_names_it_there_only() -> None:
    with pytest.raises(StrategyError, match="has no option virtal\n  fix: write virtual=..."):
        interleaved_one_f_one_b(pp=2, microbatches=4, virtal=2)
    with pytest.raises(StrategyError, match="gpipe has no option virtual\n  fix: leave it out, or"):
        gpipe(pp=2, microbatches=4, virtual=2)


def test_builders_have_the_names_of_the_command_line() -> None:
    assert set(BUILDERS) == {
        "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zbv", "dualpipev",
        "dualpipe",
    }  # fmt: skip


@pytest.fixture
def quiet_heap() -> Iterator[None]:
    """What other tests left in memory is not walked through while this one is timed."""
    gc.freeze()
    yield
    gc.unfreeze()


def seconds(work: Callable[[], object]) -> float:
    begun = process_time()
    work()
    return process_time() - begun


@pytest.mark.usefixtures("quiet_heap")
def test_sixteen_ranks_and_two_thousand_microbatches_take_less_than_a_second() -> None:
    tries = (seconds(lambda: one_f_one_b(pp=16, microbatches=2000)) for _ in range(5))

    assert any(time < 1 for time in tries)  # the first on a quiet machine


@pytest.mark.usefixtures("quiet_heap")
def test_checking_and_reading_back_a_table_takes_linear_time() -> None:
    def best(microbatches: int) -> float:
        schedule = schedules.dualpipev(8, microbatches)
        return min(seconds(lambda: to_table(from_table(schedule))) for _ in range(2))

    assert best(500) < 30 * best(50)


def test_strategies_need_no_torch() -> None:
    source = Path(str(piper.strategies.__file__)).parents[2]
    code = "import sys, piper.strategies; sys.exit('torch' in sys.modules)"

    assert run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}).returncode == 0


def every_device(strategy: Strategy) -> list[int]:
    return sorted({device for row in devices(strategy).values() for device in row})


@pytest.mark.parametrize("name", BUILDERS)
def test_a_mesh_renumbers_the_devices_and_changes_nothing_else(name: str) -> None:
    def build(**options: Any) -> Strategy:
        ep = 4 if name == "dualpipe" else 2  # both replicas of a pair are on the same devices
        return BUILDERS[name](pp=2, microbatches=4, dp=4, ep=ep, zero=1, **options)

    plain, across, inside = build(), build(mesh="pp,dp"), build(mesh="dp,pp,ep")
    listed = build(devices=[7, 6, 5, 4, 3, 2, 1, 0])

    assert build(mesh="dp,pp") == build(mesh=("dp", "pp")) == build(devices=range(8)) == plain
    assert len({plain, across, inside, listed}) == 4
    for other in (across, inside, listed):
        pairs = set(zip(flat(devices(plain)), flat(devices(other)), strict=True))
        assert len(pairs) == len(every_device(other)) == 8  # one for one
        number = dict(pairs)
        renumbered = [renamed(directive, number) for directive in plain]
        assert Strategy(renumbered) == other


def flat(placed: dict[Filter, tuple[int, ...]]) -> list[int]:
    return [device for row in placed.values() for device in row]


def renamed(directive: Directive, number: dict[int, int]) -> Directive:
    if not isinstance(directive, Place | Replicate | Shard):
        return directive
    if isinstance(directive.devices[0], int):
        return replace(directive, devices=tuple(number[d] for d in directive.devices))
    rows = tuple(tuple(number[d] for d in row) for row in directive.devices)
    return replace(directive, devices=rows)


def test_the_last_axis_of_a_mesh_has_neighbours() -> None:
    replicas = devices(gpipe(pp=2, microbatches=2, dp=4, mesh="pp,dp"))
    experts = devices(gpipe(pp=2, microbatches=2, dp=4, ep=2, mesh="dp,pp,ep"))

    assert list(replicas.values()) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert list(experts.values()) == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": "pp"}, "mesh='pp' is not an order of pp and dp (and ep)"),
        ({"mesh": "pp,dp,tp"}, "mesh='pp,dp,tp' is not an order of pp and dp (and ep)"),
        ({"mesh": "dp,pp,ep", "ep": 3}, "mesh='dp,pp,ep': ep=3 does not divide dp=2"),
        ({"devices": [0, 1, 2]}, "devices=[0, 1, 2] are not 4 different devices, as pp * dp says"),
        ({"devices": [0, 1, 2, 2]}, "devices=[0, 1, 2, 2] are not 4 different devices"),
    ],
)
def test_a_mesh_that_is_none_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(text)):
        one_f_one_b(pp=2, microbatches=2, dp=2, **options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dp": [2]}, "dp=[2] does not say how many devices each of 2 ranks has"),
        ({"dp": [2, 0]}, "dp=[2, 0] does not say how many devices each of 2 ranks has"),
        ({"dp": [2, 10**12]}, "dp=[2, 1000000000000] does not say how many devices each of 2"),
        ({"dp": [2, 4], "mesh": "pp,dp"}, "mesh needs as many devices for every rank, and dp=[2"),
        ({"dp": [1, 2], "devices": [0, 1, 1]}, "devices=[0, 1, 1] are not 3 different devices"),
    ],
)
def test_numbers_of_devices_that_no_rank_can_have(options: dict[str, Any], what: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(what)):
        one_f_one_b(pp=2, microbatches=2, **options)


def test_devices_of_unequal_ranks_are_named_rank_by_rank() -> None:
    found = devices(gpipe(pp=2, microbatches=2, dp=[1, 2], devices=[5, 3, 4]))

    assert found == {where(PP=0): (5,), where(PP=1): (3, 4)}


def test_faster_ranks_get_more_layers() -> None:
    def sizes(**options: Any) -> object:
        (stage, *_) = one_f_one_b(pp=2, microbatches=2, **options)
        assert isinstance(stage, Stage)
        return stage.cut(chain(12), {})[0].stages

    assert sizes() == (6, 6)
    assert sizes(speeds=[3, 1]) == (9, 3)
    assert sizes(dp=[1, 2]) == (4, 8)
    assert sizes(dp=[1, 2], speeds=[4, 1]) == (8, 4)
    with pytest.raises(StrategyError, match=r"speeds=\[1\] does not say how fast each of 2 ranks"):
        sizes(speeds=[1])


def test_zero_without_replicas_is_said_to_have_no_effect(caplog) -> None:
    BUILDERS["1f1b"](pp=2, microbatches=4, zero=3)
    BUILDERS["1f1b"](pp=2, microbatches=4, zero=3, dp=2)
    BUILDERS["1f1b"](pp=2, microbatches=4)

    assert caplog.messages == ["zero=3 has no effect: every stage has one replica (dp=1)"]
