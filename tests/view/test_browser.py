"""The page in a real browser: it draws, selects, zooms, moves, searches and compares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from synthetic import chain

from piper.compiler import compile_strategy
from piper.ir.model import Model
from piper.strategies import BUILDERS
from piper.view.page import page
from piper.view.story import Story, story

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


def told(name: str, model: Model, **options: int) -> Story:
    made = compile_strategy(model, BUILDERS[name](**options))
    return story(name, made.dag, made.plans)


def opened(browser: Browser, folder: Path, *stories: Story, dark: bool = False) -> Browser:
    path = folder / "page.html"
    path.write_text(page(stories))
    browser.open(path, dark=dark)
    return browser


def place(browser: Browser, node: str, device: int, view: int = 0) -> tuple[float, float]:
    """Where a node's bar is on the screen: its middle."""
    found = browser.js(
        f"""(() => {{
          const view = piper.S.views[{view}], one = view.deviceOf.get({device});
          const k = view.story.nodeOf.get({json.dumps(node)}), d = view.devices.indexOf(one);
          const b = view.barsOf.get(k).find(([at]) => at === d)[1];
          const box = piper.locate(view, one, b);
          const stage = document.getElementById("canvas").getBoundingClientRect();
          return [stage.left + box.x + box.w / 2, stage.top + box.y + box.h / 2];
        }})()"""
    )
    return found[0], found[1]


def colour(browser: Browser, point: tuple[float, float]) -> tuple[int, ...]:
    """What is drawn at a point of the screen."""
    x, y = point
    found = browser.js(
        f"""(() => {{
          const canvas = document.getElementById("canvas"), box = canvas.getBoundingClientRect();
          const pen = canvas.getContext("2d");
          return [...pen.getImageData({x} - box.left, {y} - box.top, 1, 1).data];
        }})()"""
    )
    return tuple(found[:3])


def test_a_strategy_is_drawn_where_and_in_the_colours_it_should_be(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, told("1f1b", chain(2), pp=2, microbatches=3))

    x, y = place(browser, "PP0:F@0", 0)
    forward = colour(browser, (x - 9, y - 7))
    x, y = place(browser, "PP0:B@0", 0)
    backward = colour(browser, (x - 14, y - 7))

    assert forward == (0x5A, 0xA9, 0xE6)
    assert backward == (0x2A, 0x9D, 0x78)
    assert place(browser, "PP0:F@0", 0)[0] < place(browser, "PP1:F@0", 1)[0]
    assert browser.problems == []


def test_a_bar_that_is_clicked_says_where_it_comes_from(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, told("1f1b", chain(2), pp=2, microbatches=3))

    browser.click(*place(browser, "PP1:B@1", 1))

    text = browser.js("document.getElementById('panel').innerText")
    assert text.startswith("PP1:B@1")
    assert "split (directive" in text
    assert "model.py:2" in text
    assert browser.problems == []
