"""A directive is one file: what it takes to add one, and where it then shows up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest
from docs.test_docs import pages_that_differ

import piper
from piper import Strategy, where
from piper.directives import Directive
from piper.directives.arguments import DeviceGroups, Slots
from piper.directives.base import DIRECTIVES, directive
from piper.errors import StrategyError
from piper.ir.dag import Dag
from piper.ir.filters import Filter


@pytest.fixture
def pause() -> Iterator[type[Directive]]:
    """A directive that Piper does not have, in the list while a test runs."""
    with patch.dict(DIRECTIVES):

        @directive(keys={"seconds": "duration"}, omit_defaults=("mode",))
        @dataclass(frozen=True, slots=True)
        class Pause(Directive):
            """Wait before matching regions.

            rewrite:
                F        Pause(where())
                -->
                wait -> F
            """

            filter: Filter
            seconds: float = 1.0
            around: Slots = ()
            groups: DeviceGroups = ((0, 1), (2, 3))
            mode: Literal["idle", "busy"] = "idle"

            def rewrite(self, dag: Dag) -> Dag:
                return dag

        yield Pause


def test_its_fields_are_its_json(pause: type) -> None:
    strategy = Strategy([pause(where(PP=0), around=((where(), where(PP=None)),))])

    text = strategy.to_json()

    assert text == (
        '[\n  {"op": "pause", "filter": {"PP": 0}, "duration": 1.0, '
        '"around": [[{}, {"PP": "-"}]], "groups": [[0, 1], [2, 3]]}\n]\n'
    )


def test_json_gives_it_back(pause: type) -> None:
    text = '[{"op": "pause", "filter": {}, "duration": 2.5, "mode": "busy"}]'

    assert Strategy.from_json(text) == Strategy([pause(where(), seconds=2.5, mode="busy")])


def test_it_prints_as_it_is_written(pause: type) -> None:
    short, long = pause(where()), pause(where(), mode="busy")

    assert str(short) == ("Pause(filter=where(), seconds=1.0, around=(), groups=((0, 1), (2, 3)))")
    assert str(long) == str(short)[:-1] + ", mode='busy')"


@pytest.mark.usefixtures("pause")
def test_messages_that_list_directives_list_it() -> None:
    with pytest.raises(StrategyError, match="fix: write .*, Pause, Place, .* or "):
        Strategy(["x"])
    with pytest.raises(StrategyError, match="fix: write one of .*, pause, place, "):
        Strategy.from_json('[{"op": "puase"}]')
    with pytest.raises(StrategyError, match="use filter, duration, around, groups, mode; did you"):
        Strategy.from_json('[{"op": "pause", "filter": {}, "durations": 1}]')


@pytest.mark.usefixtures("pause")
def test_it_needs_a_page_with_its_picture(tmp_path: Path) -> None:
    for page in Path(__file__).parents[2].joinpath("docs/directives").glob("*.md"):
        tmp_path.joinpath(page.name).write_text(page.read_text())
    without = pages_that_differ(tmp_path)

    tmp_path.joinpath("pause.md").write_text("# Pause\n```\nF        Pause(where())\n```\n")
    half = pages_that_differ(tmp_path)
    picture = "F        Pause(where())\n-->\nwait -> F\n"
    tmp_path.joinpath("pause.md").write_text(f"# Pause\n```\n{picture}```\n")

    assert (without, half) == (["pause"], ["pause"])
    assert pages_that_differ(tmp_path) == []


def test_a_field_without_a_json_form_fails_when_the_class_is_defined() -> None:
    @dataclass(frozen=True)
    class Odd(Directive):
        table: dict[str, int]

        def rewrite(self, dag: Dag) -> Dag:
            return dag

    with pytest.raises(TypeError, match="a field of type .* has no JSON form: add a codec for it"):
        directive()(Odd)
    assert "odd" not in DIRECTIVES


def test_a_class_outside_the_list_has_no_json() -> None:
    @dataclass(frozen=True)
    class Place:
        def rewrite(self, dag: Dag) -> Dag:
            return dag

    with pytest.raises(TypeError, match="Place has no JSON form: it lacks @directive"):
        Strategy([Place()]).to_json()


def test_every_directive_is_a_name_of_piper() -> None:
    assert all(getattr(piper, entry.kind.__name__) is entry.kind for entry in DIRECTIVES.values())


def test_every_file_of_a_directive_is_in_the_list() -> None:
    folder = Path(piper.directives.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if "@directive(" in path.read_text()}

    assert files - {"base", "json"} == set(DIRECTIVES)
