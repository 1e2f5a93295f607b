"""Pictures for papers: to scale, and honest about what they need."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from views import experts, pipeline

from piper.errors import StrategyError
from piper.view.picture import FILL, png, svg

TITLE = "{http://www.w3.org/2000/svg}title"


def widths(text: str) -> dict[str, tuple[float, float]]:
    """Where each bar begins, and how wide it is."""
    found = {}
    for rect in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}rect"):
        title = rect.find(TITLE)
        if title is not None and title.text:
            found[title.text] = (float(rect.get("x", "")), float(rect.get("width", "")))
    return found


def test_bars_are_as_wide_as_they_take() -> None:
    found = {re.split(r" +", name)[1]: box for name, box in widths(svg(pipeline())).items()}

    assert found["PP0:B@0"][1] + 0.6 == pytest.approx(2 * (found["PP0:F@0"][1] + 0.6), rel=0.01)
    assert found["PP0:F@0"][0] < found["PP0:F@1"][0] < found["PP1:B@0"][0]


def test_every_kind_has_a_colour_of_its_own_and_is_in_the_legend() -> None:
    text = svg(experts())

    assert len(set(FILL.values())) == len(FILL)
    assert ">exchange of tokens<" in text and ">reduce-scatter<" in text
    assert ">all-reduce<" not in text


def test_the_page_and_the_picture_use_the_same_colours() -> None:
    from piper.view.page import asset

    kinds = dict(re.findall(r'"?([\w-]+)"?: \["[^"]+", "(#\w{6})"\]', asset("story.js")))

    assert {kind: kinds[kind] for kind in FILL} == FILL


def test_a_png_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("piper.view.picture.find_spec", lambda name: None)

    with pytest.raises(StrategyError) as refused:
        png(pipeline(), tmp_path / "a.png")

    assert "pip install matplotlib" in str(refused.value)


def test_a_png_is_written_where_matplotlib_is_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    png(pipeline(), tmp_path / "a.png")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
