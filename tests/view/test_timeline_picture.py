"""Pictures for papers: to scale, and honest about what they need."""

from __future__ import annotations

import re
import sys
from itertools import combinations
from math import dist
from pathlib import Path
from xml.etree import ElementTree

import pytest
from views import experts, pipeline

from piper.errors import StrategyError
from piper.view.kinds import KINDS, MEMORY
from piper.view.page import page
from piper.view.timeline_picture import png, svg

FILL = {kind: fill for kind, (_, fill) in KINDS.items() if kind != "other"} | MEMORY
WORK = tuple(kind for kind in KINDS if kind != "other")

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
    assert ">token all-to-all<" in text and ">reduce-scatter<" in text
    assert ">all-reduce<" not in text


def test_the_page_and_the_picture_use_the_same_colours() -> None:
    drawn, shown = svg(experts()), page([experts()])

    used = [fill for kind, (_, fill) in KINDS.items() if kind in ("F", "BI", "exchange")]
    assert all(fill in drawn and fill in shown for fill in used)


SIGHT = {  # what is left of red, green and blue light
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """A colour as an eye tells it from others (CIE Lab)."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    r, g, b = (sum(m * c for m, c in zip(row, light, strict=True)) for row in SIGHT[sight])
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("work", [WORK[:5], WORK[5:-1], tuple(MEMORY)])
def test_colours_of_a_lane_can_be_told_apart_by_all_eyes(sight: str, work: tuple[str, ...]) -> None:
    pairs = combinations(work, 2)

    nearest = min(dist(seen(FILL[a], sight), seen(FILL[b], sight)) for a, b in pairs)

    assert nearest > 20


def test_a_png_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("piper.view.timeline_picture.find_spec", lambda name: None)

    with pytest.raises(StrategyError) as refused:
        png(pipeline(), tmp_path / "a.png")

    assert "pip install matplotlib" in str(refused.value)


def test_a_png_is_written_where_matplotlib_is_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    png(pipeline(), tmp_path / "a.png")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
