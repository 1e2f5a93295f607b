"""One file for a run: a Chrome trace that Perfetto opens, and in it all that a page shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from piper.errors import Problem, StrategyError
from piper.ir.dag import Dag
from piper.plan.analyse.trace import Trace
from piper.plan.instructions import Plan
from piper.view.chrome_trace import events
from piper.view.view_data import ViewData, story

VERSION = 1
RECORD = "record a run with `piper run train.py -n 4 --trace run.json`"


def save_run(
    path: Path, name: str, dag: Dag, plans: Sequence[Plan], traces: Sequence[Trace]
) -> None:
    """Write a run: its strategy's DAG and plans, and what was seen of some steps."""
    save_view(path, story(name, dag, plans, traces))


def save_view(path: Path, told: ViewData) -> None:
    """The Chrome trace of a story; Perfetto takes no notice of what it does not know."""
    found = {
        "displayTimeUnit": "ms",
        "traceEvents": events(told),
        "piper": {"version": VERSION, **told.to_dict()},
    }
    path.write_text(json.dumps(found, separators=(",", ":")))


def load_run(path: Path) -> ViewData:
    """Read a run again, or say why this is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise refusal(path, f"it cannot be read as JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("piper"), dict):
        raise refusal(path, "it is JSON, but no run that Piper recorded")
    if found["piper"].get("version") != VERSION:
        raise refusal(path, "another version of Piper wrote it")
    try:
        return ViewData.from_dict(found["piper"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refusal(path, f"a part of it is missing or damaged ({error!r})") from None


def refusal(path: Path, what: str) -> StrategyError:
    return StrategyError(str(path), Problem(what, RECORD))
