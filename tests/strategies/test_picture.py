"""A strategy draws itself in a notebook."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

import piper
from piper.names import BI, BW, B, F
from piper.strategies import BUILDERS, Strategy, to_table
from piper.strategies.schedules.table import Action, ranks_of
from piper.strategies.timing import STEPS, start_times


@pytest.mark.parametrize("name", BUILDERS)
def test_a_built_strategy_draws_each_of_its_passes_on_each_of_its_devices(name: str) -> None:
    strategy = BUILDERS[name](pp=2, microbatches=4)
    actions = list(to_table(strategy).actions)

    root = ElementTree.fromstring(strategy._repr_svg_())
    titles = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    passes = [one for title in titles for one in title.split("&")]

    replicas = 2 if name == "dualpipe" else 1
    assert len(passes) == replicas * len(actions)
    assert strategy._repr_html_().count("<svg") == 1


@pytest.mark.parametrize("name", BUILDERS)
def test_nothing_is_drawn_before_what_it_needs(name: str) -> None:
    table = to_table(BUILDERS[name](pp=4, microbatches=8))
    found, ranks, last = start_times(table), ranks_of(table), table.stages - 1

    def end(action: Action) -> int:
        return found[action] + STEPS[action.phase]

    for action, start in found.items():
        phase, stage, part = action.phase, action.stage, action.microbatch
        if phase is F and stage:
            assert start >= end(Action(stage - 1, F, part))
        if phase in (B, BI) and stage < last:
            after = (Action(stage + 1, kind, part) for kind in (B, BI))
            assert start >= min(end(one) for one in after if one in found)
        if phase is BW:
            assert start >= end(Action(stage, BI, part))
    for rank in range(len(table.rows)):
        mine = sorted((one for one in found if ranks[one.stage] == rank), key=found.__getitem__)
        assert all(end(one) <= found[two] for one, two in zip(mine, mine[1:], strict=False))


def test_one_f_one_b_has_the_known_length() -> None:
    found = start_times(to_table(piper.strategies.one_f_one_b(pp=4, microbatches=8)))

    assert max(start + STEPS[one.phase] for one, start in found.items()) == 3 * (8 + 4 - 1)


def test_a_strategy_without_a_schedule_shows_its_directives() -> None:
    strategy = Strategy([piper.Place(piper.where(PP=0), [0]), piper.Split("MB", 2)])

    assert strategy._repr_svg_() is None
    assert "Place(filter=where(PP=0)" in strategy._repr_html_()
