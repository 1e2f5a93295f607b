"""The schedules: their bubbles and peaks as published, and the sizes they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from strategies.clock import UNIT, bubble, clock, inputs, spans

from piper.errors import StrategyError
from piper.names import BI, BW, B, F, Phase
from piper.strategies import schedules
from piper.strategies.check import check
from piper.strategies.peak import peaks
from piper.strategies.schedules.table import Action, Table

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("pp", RANKS)
def test_gpipe_and_1f1b_lose_a_forward_and_a_backward_per_rank_but_one(pp: int) -> None:
    assert bubble(schedules.gpipe(pp, 2 * pp)) == (pp - 1) * 3
    assert bubble(schedules.one_f_one_b(pp, 2 * pp)) == (pp - 1) * 3


@pytest.mark.parametrize("pp", RANKS)
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_interleaving_loses_the_time_of_its_smaller_stages_only(pp: int, virtual: int) -> None:
    assert bubble(schedules.interleaved_one_f_one_b(pp, 4 * pp, virtual)) == (pp - 1) * 3
    assert bubble(schedules.interleaved_zb(pp, 4 * pp, virtual)) == pp - 1


@pytest.mark.parametrize("pp", RANKS)
@pytest.mark.parametrize("cost", [UNIT, {F: 4, BI: 5, BW: 3, B: 8}, {F: 3, BI: 2, BW: 2, B: 4}])
def test_zb_h1_fills_its_bubble_with_weight_gradients(pp: int, cost: Mapping[Phase, int]) -> None:
    lost = bubble(schedules.zb_h1(pp, 3 * pp), cost)

    assert lost == (pp - 1) * (cost[F] + cost[BI] - cost[BW])


@pytest.mark.parametrize("pp", RANKS)
def test_zbv_has_no_bubble_inside_a_row(pp: int) -> None:
    assert [rank.idle_inside for rank in spans(schedules.zbv(pp, 2 * pp))] == [0] * pp


@pytest.mark.parametrize("pp", RANKS)
@pytest.mark.parametrize("cost", [UNIT, {F: 2, BI: 2, BW: 1, B: 3}])
def test_dualpipev_has_the_published_bubble(pp: int, cost: Mapping[Phase, int]) -> None:
    lost = bubble(schedules.dualpipev(pp, 3 * pp), cost)

    assert lost == (pp - 1) * ((cost[F] + cost[B]) + cost[B] - 3 * cost[BW])


@pytest.mark.parametrize("pp", RANKS)
def test_peaks_are_the_published_ones(pp: int) -> None:
    microbatches = 4 * pp

    assert peaks(schedules.gpipe(pp, microbatches)) == (microbatches,) * pp
    assert peaks(schedules.one_f_one_b(pp, microbatches)) == tuple(range(pp, 0, -1))
    assert max(peaks(schedules.zb_h1(pp, microbatches))) == pp


@pytest.mark.parametrize("pp", RANKS)
def test_peaks_of_v_shapes_count_stages_of_half_the_size(pp: int) -> None:
    assert peaks(schedules.zbv(pp, 4 * pp)) == (2 * pp,) * pp
    assert peaks(schedules.dualpipev(pp, 4 * pp)) == (2 * pp + 1,) * pp


@pytest.mark.parametrize("virtual", [2, 3])
def test_peaks_of_interleaving_grow_by_its_longer_warmup(virtual: int) -> None:
    warmups = [(virtual - 1) * 4 + 2 * (3 - rank) for rank in range(4)]

    found = peaks(schedules.interleaved_one_f_one_b(4, 16, virtual))

    assert found == tuple(warmup + 1 for warmup in warmups)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("pp", [2, 4])
def test_fewer_microbatches_than_stages_are_legal(pp: int, microbatches: int) -> None:
    for build in (
        schedules.one_f_one_b, schedules.zb_h1, schedules.dualpipev, schedules.dualpipe,
        schedules.interleaved_one_f_one_b, schedules.interleaved_zb, schedules.zbv,
    ):  # fmt: skip
        if microbatches < pp or build in (schedules.dualpipev, schedules.zbv):
            table = build(pp, microbatches)
            check(table)
            assert table.microbatches == microbatches


SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": schedules.gpipe, "1f1b": schedules.one_f_one_b, "zb-h1": schedules.zb_h1,
    "interleaved-1f1b": schedules.interleaved_one_f_one_b,
    "interleaved-zb": schedules.interleaved_zb, "zbv": schedules.zbv,
    "dualpipev": schedules.dualpipev, "dualpipe": schedules.dualpipe,
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_not_filled_notes_its_bubble(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The figure is that of the drawn schedule, which knows the order."""
    needed = 8 if name == "dualpipev" else 4
    SCHEDULES[name](pp=4, microbatches=needed)
    assert not caplog.messages

    SCHEDULES[name](pp=4, microbatches=1)

    assert caplog.messages == [
        f"{name}: 1 microbatch cannot fill a pipeline of 4 devices, and {needed} or more can; "
        "`piper schedule` shows how long devices are idle"
    ]


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_both_directions_of_dualpipe_run_at_once(pp: int) -> None:
    """Device by device and replica by replica: twice the devices, and the bubble of the V."""
    table = schedules.dualpipe(pp, 2 * pp)
    rows = [both_replicas(table, device, pp) for device in range(pp)]
    there = {item for row in rows for slot in row for item in slot}
    needs = {
        (replica, a): [(replica, need) for need in inputs(a) if (replica, need) in there]
        for replica, a in there
    }

    devices = clock(rows, needs, lambda item: UNIT[item[1].phase])

    lost = max(device.end for device in devices) - devices[0].busy
    assert lost == (pp // 2 - 1) * 2


def both_replicas(table: Table, device: int, pp: int) -> list[tuple[tuple[int, Action], ...]]:
    """Replica 0 has stage d on device d, replica 1 on device pp-1-d."""
    row = table.rows[min(device, pp - 1 - device)]
    return [tuple((int(a.stage != device), a) for a in slot) for slot in row]


REFUSED: list[tuple[Callable[..., Table], dict[str, int], str]] = [
    (
        schedules.gpipe,
        {"pp": 0, "microbatches": 0},
        "gpipe: pp=0 is too small\n  fix: write pp=1 or more\n"
        "gpipe: microbatches=0 is too small\n  fix: write microbatches=1 or more",
    ),
    (
        schedules.one_f_one_b,
        {"pp": 2, "microbatches": -1},
        "1f1b: microbatches=-1 is too small\n  fix: write microbatches=1 or more",
    ),
    (
        schedules.interleaved_one_f_one_b,
        {"pp": 2, "microbatches": 4, "virtual": 1},
        "interleaved-1f1b: virtual=1 leaves nothing to interleave: a rank needs at least 2 stages"
        "\n  fix: write virtual=2 or more, or use 1f1b",
    ),
    (
        schedules.interleaved_one_f_one_b,
        {"pp": 4, "microbatches": 9},
        "interleaved-1f1b: microbatches=9 on pp=4 is 2 rounds, and 9 microbatches do not divide "
        "into 2 equal rounds\n  fix: write microbatches=8 or 10",
    ),
    (
        schedules.zb_h1,
        {"pp": 0, "microbatches": 1},
        "zb-h1: pp=0 is too small\n  fix: write pp=1 or more",
    ),
    (
        schedules.interleaved_zb,
        {"pp": 2, "microbatches": 4, "virtual": 0},
        "interleaved-zb: virtual=0 leaves nothing to interleave: a rank needs at least 2 stages"
        "\n  fix: write virtual=2 or more, or use zb-h1",
    ),
    (
        schedules.zbv,
        {"pp": 2, "microbatches": 0},
        "zbv: microbatches=0 is too small\n  fix: write microbatches=1 or more",
    ),
    (
        schedules.dualpipe,
        {"pp": 3, "microbatches": 8},
        "dualpipe: pp=3 is not even and positive: devices d and pp-1-d have the same stages\n"
        "  fix: write pp=2 or pp=4",
    ),
    (
        schedules.dualpipe,
        {"pp": 1, "microbatches": 8},
        "dualpipe: pp=1 is not even and positive: devices d and pp-1-d have the same stages\n"
        "  fix: write pp=2",
    ),
]


@pytest.mark.parametrize(("build", "sizes", "message"), REFUSED)
def test_sizes_that_cannot_be_are_refused_with_those_that_can(
    build: Callable[..., Table], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(StrategyError) as refused:
        build(**sizes)

    assert str(refused.value) == message
