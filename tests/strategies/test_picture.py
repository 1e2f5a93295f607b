"""A strategy draws itself in a notebook."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

import piper
from piper.names import BI, BW, B, F
from piper.strategies import BUILDERS, Strategy, to_table
from piper.strategies.picture import bars

NAMED = [name for name in BUILDERS if name != "dualpipe"]


@pytest.mark.parametrize("name", NAMED)
def test_a_built_strategy_draws_each_of_its_passes_once(name: str) -> None:
    strategy = BUILDERS[name](pp=2, dp=2, microbatches=4)
    actions = list(to_table(strategy).actions)

    root = ElementTree.fromstring(strategy._repr_svg_())
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]

    assert len(titles) == len(set(titles)) == len(actions)
    assert strategy._repr_html_().count("<svg") == 1


@pytest.mark.parametrize("name", NAMED)
def test_nothing_is_drawn_before_what_it_needs(name: str) -> None:
    strategy = BUILDERS[name](pp=3, microbatches=6)
    found = {
        (b.action.phase, b.action.stage, b.action.microbatch): b for b in bars(to_table(strategy))
    }
    last = max(stage for _, stage, _ in found)

    for (phase, stage, part), bar in found.items():
        if phase is F and stage:
            assert bar.start >= found[F, stage - 1, part].end
        if phase in (B, BI) and stage < last:
            after = found.get((B, stage + 1, part)) or found[BI, stage + 1, part]
            assert bar.start >= after.end
        if phase is BW:
            assert bar.start >= found[BI, stage, part].end
    for one in found.values():
        same = [two for two in found.values() if two.rank == one.rank and two is not one]
        assert all(two.end <= one.start or one.end <= two.start for two in same)


def test_one_f_one_b_has_the_known_length() -> None:
    found = bars(to_table(piper.strategies.one_f_one_b(pp=4, microbatches=8)))

    assert max(bar.end for bar in found) == 3 * (8 + 4 - 1)


def test_a_strategy_without_a_schedule_shows_its_directives() -> None:
    strategy = Strategy([piper.Place(piper.where(PP=0), [0]), piper.Split("MB", 2)])

    assert strategy._repr_svg_() is None
    assert piper.strategies.dualpipe(pp=2, microbatches=4)._repr_svg_() is None
    assert "Place(filter=where(PP=0)" in strategy._repr_html_()
