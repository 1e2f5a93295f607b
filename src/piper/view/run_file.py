"""The file of a run: a Chrome trace for Perfetto that also contains the data of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from piper.errors import StrategyError
from piper.ir.dag import Dag
from piper.plan.analyse.trace import Trace
from piper.plan.instructions import Plan
from piper.view.chrome_trace import events
from piper.view.view_data import OPTIMIZER_STATE, ViewData, view_data

VERSION = 1
RECORD = "record a run with `piper run train.py -n 4 --trace run.json`"


def save_run(
    path: Path,
    name: str,
    dag: Dag,
    plans: Sequence[Plan],
    traces: Sequence[Trace],
    machine: str = "",
    notes: Sequence[str] = (),
    optimizer: float = OPTIMIZER_STATE,
) -> None:
    """Write a run: the DAG and plans of its strategy, and the traces of some steps."""
    data = view_data(name, dag, plans, traces, notes=notes, machine=machine, optimizer=optimizer)
    save_view(path, data)


def save_view(path: Path, data: ViewData) -> None:
    """Write a Chrome trace with the data under its own key, which Perfetto ignores."""
    found = {
        "displayTimeUnit": "ms",
        "traceEvents": events(data),
        "piper": {"version": VERSION, **data.to_dict()},
    }
    path.write_text(json.dumps(found, separators=(",", ":")))


def load_run(path: Path) -> ViewData:
    """Read a run, or raise an error that says why it is not one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise refusal(path, f"it cannot be read as JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("piper"), dict):
        raise refusal(path, "it is JSON, but not a run that Piper recorded")
    if found["piper"].get("version") != VERSION:
        raise refusal(path, "it was written by another version of Piper")
    try:
        return ViewData.from_dict(found["piper"])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise refusal(path, f"part of it is missing or damaged ({error!r})") from None


def refusal(path: Path, what: str) -> StrategyError:
    return StrategyError.of(str(path), what, RECORD)
