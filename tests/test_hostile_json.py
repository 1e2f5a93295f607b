"""JSON that anybody may have written: whatever it says is read or told, never a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from draws import drawn, draws
from hostile import DEEP, VALUES, changed, places

from piper import strategies
from piper.costs.costs import Costs
from piper.costs.links import NETWORKS, Network
from piper.directives.strategy import Strategy
from piper.errors import PiperError
from piper.launcher.ending import Ended, Report, cause


def read_strategy(text: str) -> None:
    found = Strategy.from_json(text)
    assert Strategy.from_json(found.to_json()) == found


def read_report(text: str) -> None:
    found = Report.from_json(text)
    failed = Ended(0, 1, found.when, found.reason, found.culprit)
    cause([failed, Ended(1, 75, found.when, found.reason, found.culprit)])


READERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "strategy": (
        strategies.one_f_one_b(pp=2, dp=2, zero=1, microbatches=4).to_json(), read_strategy
    ),
    "costs": (Costs().to_json(), lambda text: Costs.from_json(text).to_json()),
    "network": (NETWORKS["a100"].to_json(), Network.from_json),
    "report": (Report("  it failed", 1, 3.0).to_json(), read_report),
}  # fmt: skip


@drawn
@pytest.mark.parametrize("name", READERS)
def test_any_value_may_be_anything(name: str) -> None:
    text, read = READERS[name]
    document, draw = json.loads(text), random.Random(0)
    cases = [(at, to) for at in places(document) for to in VALUES]
    draw.shuffle(cases)
    texts = [json.dumps(changed(document, *case)) for case in cases[: draws(150, 10_000)]]

    for one in (*texts, DEEP, "", "null", "[1]", "{", f'{{"a": {"9" * 5000}}}'):
        try:
            read(one)
        except PiperError:
            continue
    read(text)
