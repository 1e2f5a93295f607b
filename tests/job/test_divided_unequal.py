"""Weights and tokens are divided in stages with different numbers of devices."""

from __future__ import annotations

import dense_net as dense
import pytest
from draws import every

from piper import Place, Replicate, Shard, Split, Strategy, strategies, where
from piper.ir.placement.replicas import replicas

BUILT = {
    "tp": lambda: strategies.one_f_one_b(pp=2, microbatches=2, dp=[1, 2], tp=2, zero=3),
    "cp": lambda: strategies.zb_h1(pp=2, microbatches=2, dp=[2, 1], cp=2, zero=1),
    "four to two": lambda: strategies.gpipe(pp=2, microbatches=1, dp=[4, 2], tp=2, zero=2),
    "both directions": lambda: strategies.dualpipe(pp=2, microbatches=1, dp=[1, 2], tp=2),
    "tp with cp": lambda: strategies.one_f_one_b(pp=2, microbatches=2, dp=[1, 2], tp=2, cp=2),
    "ring": lambda: strategies.one_f_one_b(
        pp=2, microbatches=2, dp=[2, 1], cp=2, cp_attention="zigzag", remat=True
    ),
}


@pytest.mark.parametrize("name", every(len(BUILT), BUILT))
def test_ranks_may_have_different_numbers_of_groups(name: str) -> None:
    dense.agree(dense.run(BUILT[name]()))


def by_hand(first: list[int], second: list[int], zero: int, whole: bool = False) -> Strategy:
    """Two layers, in groups of two devices; the second layer may be whole on each."""
    made = []
    for layer, devices in enumerate((first, second)):
        here = where(L=layer)
        made += [Place(here, devices), Replicate(here, sorted(set(devices)), zero=zero)]
        if not (whole and layer):
            groups = [devices[k : k + 2] for k in range(0, len(devices), 2)]
            made.append(Shard(here, groups, what="weights"))
    return Strategy([*made, Split("MB", 2)])


WRITTEN = {
    "some devices of the stage before": by_hand([0, 1, 2, 3], [0, 1, 4, 5], zero=1),
    "one of its groups": by_hand([0, 1, 2, 3], [2, 3], zero=3),
    "a whole stage on fewer devices": by_hand([0, 1, 2, 3], [4, 5], zero=0, whole=True),
    "a whole stage on more devices": by_hand([0, 1], [2, 3, 4, 5], zero=2, whole=True),
}


@pytest.mark.parametrize("name", every(2, WRITTEN))
def test_stages_may_have_some_devices_in_common(name: str) -> None:
    dense.agree(dense.run(WRITTEN[name]))


def test_a_group_stays_together_however_often_it_computes() -> None:
    found = replicas([(0, 1, 2, 3), (4, 5, 6, 7, 8, 9)], [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)])

    assert found.lists[0] == (0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3)
    assert found.teams == tuple((k, k + 1) for k in range(0, 12, 2))
    assert found.parts == 6
