"""Wherever a stream is shown, so is what it gets of a GPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape

from views import divided, experts

from piper.view.chrome_trace import events
from piper.view.timeline_picture import svg
from piper.view.view_data import ViewData

LABELS = {"ep": "ep (20 SMs, high)", "compute": "compute (112 SMs)"}


def test_view_data_knows_the_streams_with_a_share() -> None:
    found = divided()

    assert found.streams == LABELS
    assert [found.label(name) for name in ("ep", "pp")] == ["ep (20 SMs, high)", "pp"]
    assert ViewData.from_json(found.to_json()).streams == LABELS


def test_view_data_of_an_older_file_has_no_shares() -> None:
    data = experts().to_dict()
    assert data.pop("streams") == {}

    again = ViewData.from_json(json.dumps(data))

    assert again.streams == {}


def test_perfetto_names_threads_by_them() -> None:
    found = events(divided())

    names = {e["args"]["name"] for e in found if e["name"] == "thread_name"}

    assert {*LABELS.values(), "pp"} <= names
    assert not {"ep", "compute"} & names


def test_a_picture_has_them_at_the_left() -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg(divided()))

    counted = [texts.count(label) for label in LABELS.values()]

    assert counted == [4, 4]  # on each device
    assert "ep" not in map(unescape, texts)


def test_a_picture_without_shares_is_as_it_was() -> None:
    found = divided()

    plain = svg(replace(found, streams={}))

    assert plain == svg(replace(experts(), traces=found.traces))
