"""The page in a real browser: it draws, selects, zooms, moves, searches and compares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, Point
from views import crowd, divided, experts, measured, opened, pipeline

from piper.view.view_data import ViewData

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

FORWARD, BACKWARD, EXCHANGE = (0x5A, 0xA9, 0xE6), (0x1F, 0x7A, 0x5A), (0xCC, 0x33, 0x44)


def box(browser: Browser, node: str, device: int, view: int = 0) -> dict[str, float]:
    """Where a node's bar is on the screen."""
    return browser.js(
        f"""(() => {{
          const view = piper.S.views[{view}], one = view.deviceOf.get({device});
          const k = view.run.nodeOf.get({json.dumps(node)}), d = view.devices.indexOf(one);
          const b = view.barsOf.get(k).find(([at]) => at === d)[1];
          const stage = document.getElementById("canvas").getBoundingClientRect();
          const {{ x, y, w, h }} = piper.locate(view, one, b);
          return {{ x: stage.left + x, y: stage.top + y, w, h }};
        }})()"""
    )


def middle(browser: Browser, node: str, device: int, view: int = 0) -> Point:
    found = box(browser, node, device, view)
    return found["x"] + found["w"] / 2, found["y"] + found["h"] / 2


def colour(browser: Browser, node: str, device: int, view: int = 0) -> tuple[int, ...]:
    """What is drawn in the upper left corner of a bar, where no label is."""
    found = box(browser, node, device, view)
    x, y = found["x"] + min(3, found["w"] / 2), found["y"] + 2
    return pixel(browser, x, y)


def pixel(browser: Browser, x: float, y: float) -> tuple[int, ...]:
    found = browser.js(
        f"""(() => {{
          const canvas = document.getElementById("canvas"), box = canvas.getBoundingClientRect();
          const pen = canvas.getContext("2d");
          return [...pen.getImageData({x} - box.left, {y} - box.top, 1, 1).data];
        }})()"""
    )
    return tuple(found[:3])


def panel(browser: Browser) -> str:
    return browser.js("document.getElementById('panel').innerText")


def selected(browser: Browser) -> str:
    return browser.js("document.querySelector('#panel h2').innerText")


def window(browser: Browser) -> Point:
    """The time that is shown."""
    found = browser.js("[piper.S.t0, piper.S.t1]")
    return found[0], found[1]


def test_a_strategy_is_drawn_where_and_in_the_colours_it_should_be(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, pipeline())

    assert colour(browser, "PP0:F@0", 0) == FORWARD
    assert colour(browser, "PP1:B@2", 1) == BACKWARD
    first, second = box(browser, "PP0:F@0", 0), box(browser, "PP0:B@0", 0)
    assert second["w"] == pytest.approx(2 * first["w"], rel=0.01)
    assert box(browser, "PP1:F@0", 1)["x"] >= first["x"] + first["w"] - 1
    assert box(browser, "PP1:F@0", 1)["y"] > first["y"] + first["h"]


def test_a_receive_is_not_called_a_send(browser: Browser, tmp_path: Path) -> None:
    """Both ends of a transfer are one node, whose name begins with `send`."""
    opened(browser, tmp_path, pipeline())

    labels = browser.js(
        """piper.S.views[0].devices.map((one) => [...one.kind.keys()]
          .filter((b) => ["send", "recv"].includes(one.plan.kind[one.at[b]]))
          .map((b) => [one.plan.kind[one.at[b]], longLabel(piper.S.views[0], one, b)])).flat()"""
    )

    starts = {(kind, label.split()[0]) for kind, label in labels}
    assert starts == {("send", "send"), ("recv", "receive")}


@pytest.mark.parametrize(
    ("found", "names"),
    [(experts(), {"PP0:F@0", "PP0.EP0:F@0", "PP0#1:F@0"}), (pipeline(), {"F0"})],
    ids=["several regions", "one region"],
)
def test_the_parts_of_a_pass_have_names_of_their_own_where_they_fit(
    browser: Browser, tmp_path: Path, found: ViewData, names: set[str]
) -> None:
    opened(browser, tmp_path, found)

    drawn = browser.js(
        """(() => {
          const texts = [], view = piper.S.views[0], one = view.devices[0];
          CanvasRenderingContext2D.prototype.fillText = (text) => texts.push(text);
          for (const [b, at] of [...one.at].entries()) {
            const node = one.plan.node[at], nodes = view.run.nodes;
            if (node >= 0 && nodes.phase[node] === "F" && nodes.microbatch[node] === "0")
              drawBar(view, one, b, 200, 0, 300, 20, false);
          }
          return texts;
        })()"""
    )

    assert names <= set(drawn)


def test_a_message_has_one_name_in_its_bar_and_in_the_panel(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, pipeline())
    browser.js(
        """(() => {
          const view = piper.S.views[0], one = view.devices[1];
          const b = [...one.kind.keys()].find((b) => one.plan.kind[one.at[b]] === "recv");
          piper.select({ view, one, b });
        })()"""
    )

    links = browser.js("[...document.querySelectorAll('#panel .what')].map((one) => one.innerText)")

    assert selected(browser) == "receive activations of PP0:F@0"
    assert links.count("send activations of PP0:F@0 on device 0") == 1
    assert "its other end" in panel(browser).lower().splitlines()


def test_what_streams_get_of_a_gpu_is_said_of_the_step_and_of_a_bar(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, divided())
    assert "streams: ep (20 SMs, high), compute (112 SMs)" in panel(browser)

    browser.click(*middle(browser, "PP0:F@0", 0))

    assert "stream compute (112 SMs)" in panel(browser)


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_drawn_on_light_and_on_dark_ground(
    browser: Browser, tmp_path: Path, dark: bool
) -> None:
    opened(browser, tmp_path, pipeline(), dark=dark)

    ground = pixel(browser, 20, 880)

    assert (max(ground) < 60) if dark else (min(ground) > 220)
    assert colour(browser, "PP0:F@0", 0) == FORWARD


def test_communication_has_lanes_of_its_own_below_compute(browser: Browser, tmp_path: Path) -> None:
    found = opened(browser, tmp_path, experts())

    name = found.js("piper.S.views[0].run.nodes.id.find((id) => id.startsWith('to PP0.EP0:F'))")
    message, compute = box(browser, name, 0), box(browser, "PP0:F@0", 0)

    assert colour(browser, name, 0) == EXCHANGE
    assert message["y"] >= compute["y"] + compute["h"]


def test_waiting_is_striped_and_says_what_for(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())
    before = box(browser, "PP1:F@0", 1)

    browser.click(before["x"] - before["w"] / 2, before["y"] + before["h"] / 2)

    row = {pixel(browser, before["x"] - 20 + k, before["y"] + 8) for k in range(16)}
    assert len(row) > 1
    assert selected(browser) == "device 1 is idle"
    assert "receive activations of PP0:F@0" in panel(browser)


def test_a_bar_that_is_clicked_says_where_it_comes_from(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())

    browser.click(*middle(browser, "PP1:B@1", 1))

    text = panel(browser)
    assert text.startswith("PP1:B@1")
    for part in ("split (directive", "order (directive", "model.py:2", "PP=1", "MB=1", "2.00 s"):
        assert part in text
    edges = browser.js("[...document.querySelectorAll('svg.graph .edge')].map(e => e.classList[1])")
    assert "temporal" in edges and None in edges


def test_an_expected_time_is_shown_if_it_is_another(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())

    browser.click(*middle(browser, "PP1:B@1", 1))

    assert "takes" in panel(browser)
    assert "expected" not in panel(browser)


def test_arithmetic_has_a_unit_of_its_size(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())

    texts = browser.js(
        "[[8.39e6, 'FLOP'], [17.9e9, 'FLOP/s'], [12, 'FLOP'], [999999, 'FLOP'], [4e15, 'FLOP']]"
        ".map(([amount, unit]) => scaled(amount, unit))"
    )

    assert texts == ["8.39 MFLOP", "17.9 GFLOP/s", "12 FLOP", "1 MFLOP", "4 PFLOP"]


def test_labels_of_the_graph_fit_into_their_boxes(browser: Browser, tmp_path: Path) -> None:
    found = opened(browser, tmp_path, experts())
    name = found.js("piper.S.views[0].run.nodes.id.find((id) => id.startsWith('to PP0.EP0:F'))")
    browser.click(*middle(browser, name, 0))

    wide = browser.js(
        """[...document.querySelectorAll('svg.graph g.node')].map((group) => [
          group.querySelector('rect').getBBox(), group.querySelector('text').getBBox()])
          .filter(([box, text]) => text.width > box.width || text.height > box.height).length"""
    )
    outside = browser.js(
        """(() => {
          const svg = document.querySelector('svg.graph'), view = svg.viewBox.baseVal;
          return [...svg.querySelectorAll('text')].map((one) => one.getBBox())
            .filter((box) => box.x < 0 || box.y < 0 || box.x + box.width > view.width
              || box.y + box.height > view.height).length;
        })()"""
    )

    assert (wide, outside) == (0, 0)


def test_a_neighbour_in_the_graph_can_be_clicked(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())
    browser.click(*middle(browser, "PP1:B@1", 1))

    browser.js(
        "document.querySelector('svg.graph g[aria-label=\"PP1:F@1\"]')"
        ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )

    assert selected(browser) == "PP1:F@1"


def test_what_a_bar_waits_for_can_be_followed_to_another_device(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, pipeline())
    browser.click(*middle(browser, "PP1:F@1", 1))

    for message in ("receive activations of PP0:F@1", "send activations of PP0:F@1"):
        browser.js(
            "[...document.querySelectorAll('#panel .link')]"
            f".find((link) => link.innerText.includes('{message}')).click()"
        )

    assert selected(browser) == "send activations of PP0:F@1"
    assert "device 0, stream pp" in panel(browser)


def test_the_wheel_zooms_around_the_mouse(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())
    x, y = middle(browser, "PP0:B@1", 0)
    before = window(browser)

    browser.wheel(x, y, -240)

    after = window(browser)
    assert after[1] - after[0] < 0.7 * (before[1] - before[0])
    inside = box(browser, "PP0:B@1", 0)
    assert inside["x"] < x < inside["x"] + inside["w"]


def test_keys_zoom_move_and_fit(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())
    whole = window(browser)

    browser.key("+")
    closer = window(browser)
    browser.key("ArrowRight")
    moved = window(browser)
    browser.key("0")

    assert closer[1] - closer[0] < whole[1] - whole[0]
    assert moved[0] > closer[0]
    assert moved[1] - moved[0] == pytest.approx(closer[1] - closer[0])
    assert window(browser) == pytest.approx(whole)


def test_dragging_moves_and_with_shift_it_marks(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())
    browser.key("+")
    browser.key("+")
    before = window(browser)

    browser.drag((600, 300), (500, 300))
    moved = window(browser)
    browser.drag((400, 300), (500, 300), shift=True)
    marked = window(browser)

    assert moved[0] > before[0]
    assert marked[1] - marked[0] < 0.2 * (moved[1] - moved[0])


def test_keys_step_along_a_lane_and_escape_selects_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, pipeline())
    browser.click(*middle(browser, "PP0:F@0", 0))

    browser.key(".")
    stepped = selected(browser)
    browser.key(",")
    back = selected(browser)
    browser.key("Escape")

    assert (stepped, back) == ("PP0:F@1", "PP0:F@0")
    assert browser.js("piper.S.selected") is None


def test_a_search_by_tags_lights_up_what_it_finds(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())

    browser.type("#search", "pp=1 MB=2 PASS=F")

    assert browser.js("document.getElementById('found').value") == "1 found"
    assert colour(browser, "PP1:F@2", 1) == FORWARD
    assert colour(browser, "PP1:F@1", 1) != FORWARD


def test_enter_steps_through_what_a_search_found(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())
    browser.type("#search", "PASS=B DEVICE=0")

    seen = []
    for _ in range(4):
        browser.key("Enter")
        seen.append(selected(browser))

    assert seen == ["PP0:B@0", "PP0:B@1", "PP0:B@2", "PP0:B@0"]


def test_the_legend_hides_a_kind(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())

    browser.js("document.querySelector('#legend [data-kind=F]').click()")
    browser.settle()

    assert colour(browser, "PP0:F@0", 0) != FORWARD
    assert colour(browser, "PP0:B@0", 0) == BACKWARD


def test_the_mouse_over_a_message_tells_how_much_of_it_is_hidden(
    browser: Browser, tmp_path: Path
) -> None:
    found = opened(browser, tmp_path, experts())
    name = found.js("piper.S.views[0].run.nodes.id.find((id) => id.startsWith('to PP0.EP0:F'))")

    browser.mouse("mouseMoved", *middle(browser, name, 0))
    browser.settle()

    assert "behind compute" in browser.js("document.getElementById('tip').innerText")


def test_memory_shows_its_peak_and_what_holds_it(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())
    x, y = browser.js(
        """(() => {
          const box = document.getElementById("canvas").getBoundingClientRect();
          const {y, h} = piper.S.rows[0].memory;
          return [box.left + 400, box.top + 26 - piper.S.scroll + y + h - 3];
        })()"""
    )

    browser.click(x, y)

    text = panel(browser)
    assert text.startswith("memory of device 0")
    assert "AT THE PEAK" in text.upper() and "saved:PP0@" in text
    assert pixel(browser, x, y) == (0x4B, 0x4C, 0x74)  # parameters, at the bottom


def test_the_label_of_a_peak_is_beside_its_dot(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline())

    low, middle, high = browser.js("[148, 120, 102].map((y) => peakLabelTop(y, 100, 50))")

    assert (low, middle, high) == (137, 113.5, 101)


def test_two_strategies_are_compared_on_one_axis(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline("1f1b"), pipeline("zb-h1"))

    upper, lower = box(browser, "PP0:F@0", 0), box(browser, "PP0:F@0", 0, view=1)
    table = browser.js("document.getElementById('totals').innerText")

    assert lower["x"] == upper["x"] and lower["w"] == pytest.approx(upper["w"])
    assert lower["y"] > upper["y"]
    assert "step" in table and "peak memory" in table
    assert "equally long in both: 8 of 8 nodes" in panel(browser)
    assert "worst first" not in panel(browser)  # there is nothing to sort


def test_boxes_to_check_stay_together(browser: Browser, tmp_path: Path) -> None:
    """At any width, also where they need a line of their own."""
    opened(browser, tmp_path, pipeline("1f1b"), pipeline("zb-h1"))

    rows = []
    for width in (1400, 1100, 700):
        browser.resize(width, 900)
        browser.settle()
        tops = browser.js(
            "['critical', 'messages', 'memory']"
            ".map((id) => document.getElementById(id).getBoundingClientRect().top)"
        )

        assert len(set(tops)) == 1
        rows.append(browser.js("document.querySelector('header .row').clientHeight"))
    assert rows[0] < 30 < rows[-1]  # one line, then several


def test_what_is_selected_in_one_is_selected_in_the_other(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, pipeline("1f1b"), pipeline("zb-h1"))

    browser.click(*middle(browser, "PP1:F@2", 1))

    twin = "piper.S.twin"
    other = browser.js(f"{twin}.view.run.nodes.id[{twin}.one.plan.node[{twin}.one.at[{twin}.b]]]")
    assert other == "PP1:F@2"
    assert browser.js(f"{twin}.view === piper.S.views[1] && {twin}.one.device === 1")
    assert "in zb-h1" in panel(browser)


def test_a_measured_run_is_held_against_its_plan(browser: Browser, tmp_path: Path) -> None:
    plan = pipeline()
    seen = measured(plan, factor=3.0)

    opened(browser, tmp_path, plan.with_traces([plan.traces[0], seen.traces[0]]))

    rows = browser.js(
        "[...document.querySelectorAll('#differences table:last-of-type tr.go')]"
        ".map((row) => row.lastChild.innerText)"
    )
    assert len(rows) > 10 and set(rows) == {"3.00x"}
    assert browser.js("document.getElementById('first').value") == "0"


def test_a_measured_run_alone_is_held_against_what_was_expected(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, measured(pipeline(), factor=2.0))

    browser.click(*middle(browser, "PP0:B@0", 0))

    assert "4.00 s (2.00x of expected)" in panel(browser)


def test_the_page_fits_a_small_window(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, experts(), width=900, height=700)

    for width, height in ((900, 700), (420, 900)):
        browser.resize(width, height)
        browser.settle()
        wide = browser.js("document.documentElement.scrollWidth")
        high = browser.js("document.documentElement.scrollHeight")

        assert (wide, high) == (width, height)
        assert browser.js("document.getElementById('canvas').clientHeight") > 200


def test_fifty_thousand_bars_are_drawn_without_a_jerk(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, crowd())
    many = browser.js("piper.S.views[0].devices.reduce((sum, one) => sum + one.count, 0)")

    took = browser.js(
        "Array.from({length: 25}, () => (piper.draw(), piper.S.took)).sort((a, b) => a - b)"
    )

    assert many > 50_000
    assert took[0] < 30, f"a frame takes {took} ms"  # the others may have had to share a core


def test_a_page_of_nothing_says_so(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path)

    assert "nothing to show" in panel(browser)
