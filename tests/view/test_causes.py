"""The page in a real browser: the critical path, bubbles, exposed messages, and why things wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from synthetic import chain, moe_chain
from views import SLOW, compiled, divided, measured, opened, pipeline

from piper.costs import Costs
from piper.job.compile.compiler import Compiled
from piper.job.compile.pricing import price
from piper.names import COMPUTE
from piper.plan.analyse.trace import MEASURED, Span, Trace
from piper.sim.report import HOST, report
from piper.view.page import page
from piper.view.reports.simulation_text import idle_text
from piper.view.view_data import ViewData, view_data

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
EXPERTS = {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "microbatches": 4}


def simulated(made: Compiled, costs: Costs = SLOW, machine: str = "") -> ViewData:
    return view_data("step", made.dag, made.plans, [price(made, costs).trace], machine=machine)


def path_shares(browser: Browser) -> dict[str, float]:
    """Seconds of each kind of work on the path, as the page draws it."""
    found = browser.js(
        """(() => {
          const { shares, hosts } = pathShares(piper.S.views[0], piper.S.steps[0]);
          return [...shares.map(([k, time]) => [KIND_IDS[k], time]), ["hosts", hosts]];
        })()"""
    )
    return dict(found)


def panel(browser: Browser) -> str:
    return browser.js("document.getElementById('panel').innerText")


CASES = {
    "1f1b": compiled("1f1b", chain(2), pp=2, microbatches=3),
    "zbv": compiled("zbv", chain(8), pp=4, microbatches=8),
    "experts": compiled("dualpipev", moe_chain(4), **EXPERTS),
    "zero": compiled("1f1b", chain(2), pp=2, dp=2, zero=1, microbatches=2),
}


@pytest.mark.parametrize("made", CASES.values(), ids=CASES)
def test_the_critical_path_leads_through_the_step_without_a_gap(
    browser: Browser, tmp_path: Path, made: Compiled
) -> None:
    """There may be several that are equally long, so it need not be that of the simulator."""
    step = price(made, SLOW)
    idle = sum(part.end - part.start for part in report(step).critical if part.what == HOST)

    opened(browser, tmp_path, simulated(made))
    browser.key("c")
    shares = path_shares(browser)
    times = browser.js("piper.S.steps[0].map(([one, b]) => [one.start[b], one.end[b]])")

    assert idle == 0
    assert times[0][0] == 0 and times[-1][1] == pytest.approx(step.seconds)
    for (_, end), (start, _) in pairwise(times):
        assert start == pytest.approx(end, abs=1e-6)
    assert sum(shares.values()) == pytest.approx(step.seconds)
    assert shares["hosts"] == pytest.approx(0, abs=1e-6 * step.seconds)
    assert "CRITICAL PATH" in panel(browser).upper()


@pytest.mark.parametrize("ahead", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("made", CASES.values(), ids=CASES)
def test_exposed_communication_is_that_of_the_simulator(
    browser: Browser, tmp_path: Path, made: Compiled, ahead: bool
) -> None:
    costs = replace(SLOW, ahead=ahead)
    found = report(price(made, costs))

    opened(browser, tmp_path, simulated(made, costs))
    shown = browser.js("piper.S.views[0].devices.map((one) => [one.busy, one.exposed])")
    header = browser.js("document.getElementById('summary').innerText")

    for (busy, exposed), one in zip(shown, found.devices, strict=True):
        assert busy == pytest.approx(one.compute)
        assert exposed == pytest.approx(sum(one.exposed.values()))
    share = idle_text(found).split(", ")[1].removesuffix(" exposed communication)")
    assert f"exposed communication {share}" in " ".join(header.split())


def test_the_loss_and_norm_all_reduce_is_exposed(browser: Browser, tmp_path: Path) -> None:
    found = report(price(CASES["1f1b"], SLOW)).exposed["loss_norm"]

    opened(browser, tmp_path, simulated(CASES["1f1b"]))

    exposed = browser.js("piper.S.views[0].kinds[KIND_OF.loss_norm].exposed / 2")
    assert exposed == pytest.approx(found)
    assert found > 0


def test_c_shows_the_critical_path_and_hides_it_again(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, simulated(CASES["zbv"]))
    plain = browser.screenshot()

    browser.key("c")
    shown = browser.screenshot()
    browser.key("c")

    assert shown != plain
    assert browser.js("piper.S.path") is None
    assert "CRITICAL PATH" not in panel(browser).upper()


def test_b_goes_from_bubble_to_bubble(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, simulated(CASES["1f1b"]))
    many = browser.js("lostTime(false).length")

    seen = []
    for _ in range(many + 1):
        browser.key("b")
        seen.append(browser.js("[piper.S.selected.one.device, piper.S.selected.gap.start]"))
    browser.key("B", shift=True)

    assert many >= 3
    assert len({tuple(one) for one in seen}) == many
    assert seen[-1] == seen[0]
    assert browser.js("piper.S.selected.gap.start") == seen[-2][1]
    assert "is idle" in panel(browser)


def test_x_goes_from_one_exposed_message_to_the_next(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, simulated(CASES["experts"]))
    many = browser.js("lostTime(true).length")

    browser.key("x")
    first = browser.js("[piper.S.selected.one.device, piper.S.selected.b]")
    stream = browser.js(
        "piper.S.selected.one.plan.stream[piper.S.selected.one.at[piper.S.selected.b]]"
    )
    browser.key("x")

    assert many > 1
    assert stream != COMPUTE
    assert browser.js("[piper.S.selected.one.device, piper.S.selected.b]") != first


def test_a_wait_says_why_it_is_late(browser: Browser, tmp_path: Path) -> None:
    """Device 2 waits for PP1, which waits for PP0."""
    opened(browser, tmp_path, simulated(CASES["zbv"]))
    browser.js(
        """(() => {
          const view = piper.S.views[0], one = view.deviceOf.get(2);
          piper.select({ view, one, gap: one.gaps[0] });
        })()"""
    )

    links = browser.js("[...document.querySelectorAll('#panel .what')].map((one) => one.innerText)")

    assert [link for link in links if link.startswith("PP")] == [
        "PP1:F@0 on device 1",
        "PP0:F@0 on device 0",
    ]
    why = browser.js("document.getElementById('why').innerText")
    assert why.startswith("When the wait began, PP0:F@0 was still running on device 0.")


def test_a_measured_run_has_a_critical_path_too(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, measured(simulated(CASES["1f1b"]), factor=2.0))

    browser.key("c")

    whole = browser.js("piper.S.views[0].length")
    assert sum(path_shares(browser).values()) == pytest.approx(whole)


def recorded() -> ViewData:
    """Receives are posted early and last until the host notices them; the first work is late."""
    made = CASES["1f1b"]
    seen = simulated(made)
    kinds = {one.device: one.instructions["kind"] for one in seen.devices}
    spans = {
        device: tuple(
            replace(span, start=span.issued if kinds[device][span.at] == "recv" else span.start)
            for span in later(row, by=0.5)
        )
        for device, row in seen.traces[0].spans.items()
    }
    first = {d: (replace(row[0], issued=0.0), *row[1:]) for d, row in spans.items()}
    return seen.with_traces([Trace("seen", MEASURED, first)])


def later(row: tuple[Span, ...], by: float) -> Iterator[Span]:
    for span in row:
        yield replace(span, issued=span.issued + by, start=span.start + by, end=span.end + by)


def test_the_path_of_a_measured_run_never_runs_backwards(browser: Browser, tmp_path: Path) -> None:
    """A receive is on the path from when it was sent, not from when it was posted."""
    opened(browser, tmp_path, recorded())

    browser.key("c")
    parts = browser.js("piper.S.steps[0].map(([one, b, from, to]) => [from, to])")
    early = browser.js("piper.S.steps[0].some(([one, b, from]) => from > one.start[b] + 0.01)")

    assert early
    for (_, end), (start, _) in pairwise(parts):
        assert start >= end
    assert path_shares(browser)["hosts"] == pytest.approx(0.5)
    assert "until a host starts the next work" in panel(browser)


def test_a_bubble_of_a_late_host_does_not_say_that_the_work_is_done(
    browser: Browser, tmp_path: Path
) -> None:
    opened(browser, tmp_path, recorded())

    browser.key("b")
    first = panel(browser)
    browser.js(
        """(() => {
          const view = piper.S.views[0], one = view.devices[1];
          piper.select({ view, one, gap: one.gaps[one.gaps.length - 1] });
        })()"""
    )

    assert "its host has not started the next work yet" in first
    assert "loss and norm all-reduce" in panel(browser)


def test_a_message_has_only_the_ends_that_take_part_in_it(browser: Browser, tmp_path: Path) -> None:
    """A node of two replicas is two messages: one does not wait for the ends of the other."""
    made = compiled("1f1b", chain(2), pp=2, dp=2, microbatches=2)

    opened(browser, tmp_path, simulated(made))
    ends = browser.js(
        """piper.S.views[0].devices.map((one) => [...new Set([...one.kind.keys()]
          .filter((b) => ["send", "recv"].includes(one.plan.kind[one.at[b]]))
          .map((b) => everywhere(piper.S.views[0], one, one.at[b]).map(([d]) => d.device).join()))])
        """
    )

    pairs = {frozenset(text.split(",")) for some in ends for text in some}
    assert all(len(pair) == 2 for pair in pairs)
    assert len(pairs) == 2


def test_a_run_of_an_older_version_is_shown(browser: Browser, tmp_path: Path) -> None:
    """It has no labels of nodes, and no groups of messages."""
    found = simulated(CASES["1f1b"])
    nodes = {name: row for name, row in found.nodes.items() if name != "label"}
    devices = tuple(
        replace(one, instructions={k: row for k, row in one.instructions.items() if k != "group"})
        for one in found.devices
    )

    opened(browser, tmp_path, replace(found, nodes=nodes, devices=devices))
    browser.key("c")

    labels = browser.js("piper.S.views[0].run.nodes.label")
    assert {"PP0:F@0", "send h0@0>1", "loss and norm all-reduce"} <= set(labels)
    assert "CRITICAL PATH" in panel(browser).upper()


def test_updates_are_shown_even_if_nobody_measured_them(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, simulated(CASES["1f1b"]))

    assert "optimizer update" in browser.js("document.getElementById('legend').innerText")
    browser.type("#search", "kind=update")
    assert browser.js("document.getElementById('found').value") == "2 found"


def test_every_stream_has_a_row_of_its_own(browser: Browser, tmp_path: Path) -> None:
    """Also a stream with one bar, as that of the loss and norm all-reduce."""
    opened(browser, tmp_path, simulated(CASES["1f1b"]))

    streams = browser.js(
        """piper.S.views[0].devices.map((one) => one.lanes.map((lane) => [lane.stream,
          ...new Set(lane.rows.flatMap((row) => [...row.bars]).map((b) => streamOf(one, b)))]))"""
    )

    names = ("compute", "loss_norm", "pp")
    assert streams == 2 * [[[name, name] for name in names]]


def test_the_page_names_its_machine(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, simulated(CASES["1f1b"], machine="the data sheet of h200"))

    assert "simulated with the data sheet of h200" in panel(browser)


def test_names_of_streams_are_not_clipped(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, divided())

    room, needed = browser.js(
        """(() => {
          ctx.font = "10px system-ui, sans-serif";
          const names = piper.S.views[0].devices.flatMap((one) => one.lanes)
            .map((lane) => streamLabel(piper.S.views[0].run, lane.stream));
          return [GUTTER - 12, Math.max(...names.map((name) => ctx.measureText(name).width))];
        })()"""
    )

    assert needed <= room


@pytest.mark.parametrize("width", [700, 1000, 1400])
def test_nothing_in_the_panel_is_cut(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([simulated(CASES["experts"]), pipeline()]))
    browser.open(path, width=width)
    browser.key("c")

    cut = browser.js(
        """[...document.querySelectorAll('#panel *')]
          .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth)
          .map((one) => one.outerHTML.slice(0, 80))"""
    )
    edge = browser.js("document.getElementById('panel').getBoundingClientRect().right")
    far = browser.js(
        "Math.max(...[...document.querySelectorAll('#panel td')]"
        ".map((one) => one.getBoundingClientRect().right))"
    )

    assert cut == []
    assert far <= edge
