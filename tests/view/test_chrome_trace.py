"""The file that Perfetto opens is one that it can read, and Piper reads it again."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from synthetic import chain
from views import compiled, experts, measured, pipeline

from piper.errors import StrategyError
from piper.plan.analyse.trace import MEASURED, Span, Trace
from piper.view.chrome_trace import events
from piper.view.run_file import load_run, save_run
from piper.view.trace_bars import bars
from piper.view.view_data import ViewData, view_data

RUNS = {"pipeline": pipeline, "experts": experts, "measured": lambda: measured(experts())}


@pytest.mark.parametrize("name", RUNS)
def test_events_are_complete_and_in_order(name: str) -> None:
    found = events(RUNS[name]())

    timed = [event for event in found if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert {event["ph"] for event in found} <= {"M", "X", "s", "f", "C"}
    slices = [event for event in found if event["ph"] == "X"]
    assert slices and all(event["dur"] > 0 and event["ts"] >= 0 for event in slices)
    named = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} <= named


@pytest.mark.parametrize("name", RUNS)
def test_what_is_on_one_thread_does_not_overlap(name: str) -> None:
    threads = defaultdict(list)
    for event in events(RUNS[name]()):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))

    for spans in threads.values():
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
            assert start >= end - 1e-3


@pytest.mark.parametrize("name", RUNS)
def test_every_arrow_goes_from_a_send_to_its_receive(name: str) -> None:
    data = RUNS[name]()
    found = events(data)
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    sends = [bar for bar in bars(data, data.traces[0]) if bar.kind == "send"]

    assert starts.keys() == ends.keys() and len(starts) == len(sends) > 0
    for name, start in starts.items():
        send, receive = under(found, start), under(found, ends[name])
        assert send["cat"] == "send" and receive["cat"] == "recv"
        assert send["name"] == receive["name"]
        assert start["pid"] != ends[name]["pid"]


def under(found: list[dict[str, object]], event: dict[str, object]) -> dict[str, object]:
    """The slice that an arrow begins or ends at."""
    (one,) = [
        e
        for e in found
        if e["ph"] == "X"
        and (e["pid"], e["tid"]) == (event["pid"], event["tid"])
        and e["ts"] <= event["ts"] < e["ts"] + e["dur"]  # type: ignore[operator]
    ]
    return one


def test_a_slice_says_where_it_comes_from() -> None:
    (one,) = [event for event in events(pipeline()) if event["name"] == "PP1:B@1"]

    assert one["args"]["region"] == "PP1"
    assert one["args"]["source"] == "model.py:2"
    assert one["args"]["maker"].startswith("split (directive ")


def test_several_steps_follow_each_other() -> None:
    once = pipeline()
    twice = once.with_traces([once.traces[0], once.traces[0]])

    starts = [e["ts"] for e in events(twice) if e["name"] == "PP0:F@0"]

    assert starts[1] - starts[0] == pytest.approx(once.traces[0].seconds * 1e6)


def test_a_run_is_saved_for_perfetto_and_for_piper(tmp_path: Path) -> None:
    made = compiled("1f1b", chain(2), pp=2, microbatches=3)
    spans = {0: (Span(1, 10.0, 10.0, 11.0),), 1: (Span(2, 10.5, 11.0, 12.5),)}
    path = tmp_path / "run.json"

    save_run(path, "tiny", made.dag, made.plans, [Trace("tiny", MEASURED, spans, 3)])

    assert any(event["ph"] == "X" for event in json.loads(path.read_text())["traceEvents"])
    found = load_run(path)
    assert found == view_data("tiny", made.dag, made.plans, [Trace("tiny", MEASURED, spans, 3)])
    assert [bar.start for bar in bars(found, found.traces[0])] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("not JSON", "it cannot be read as JSON"),
        ('{"traceEvents": []}', "it is JSON, but not a run that Piper recorded"),
        ("[1]", "it is JSON, but not a run that Piper recorded"),
        ('{"piper": {"version": 0}}', "it was written by another version of Piper"),
        ('{"piper": {"version": 1, "name": "x"}}', "part of it is missing or damaged"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)

    with pytest.raises(StrategyError) as refused:
        load_run(path)

    assert what in str(refused.value)
    assert "--trace run.json" in str(refused.value)


def test_empty_view_data_gives_no_events() -> None:
    empty = ViewData("nothing", pipeline().nodes, pipeline().orders, (), ())

    assert events(empty) == []
