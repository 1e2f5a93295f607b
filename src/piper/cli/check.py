"""piper check: prove a strategy before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from piper.cli.target import inspect, strategy_of


def add_to(app: typer.Typer) -> None:
    app.command(
        "check", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(check)


def check(
    context: typer.Context,
    target: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
) -> None:
    """Check TARGET: compile a script's strategy for its model, or read a .json or .csv file.

    Exit code 0 means: every rewrite gave a valid DAG, and all plans together neither deadlock nor
    lose, double or swap anything.
    """
    if target.suffix in (".json", ".csv"):
        print(f"ok: {len(strategy_of(target))} directives, readable and consistent in themselves")
        return
    compiled = inspect(target, context.args).compiled
    count = sum(len(plan.instructions) for plan in compiled.plans)
    nodes = len(compiled.dag.nodes)
    print(
        f"ok: {len(compiled.plans)} devices, {nodes} nodes, {count} instructions: "
        "no deadlock, every gradient counted once, every buffer freed once"
    )
