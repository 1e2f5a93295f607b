"""piper show: a strategy's schedule, DAG or plans as text."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from piper.cli.files import write_text
from piper.cli.simulate import chosen_network
from piper.cli.target import PASS_ON, inspect, strategy_of
from piper.directives import Order, apply
from piper.directives.remat import policies_of
from piper.errors import InputError, StrategyError
from piper.ir.text import text
from piper.ir.training import training_dag
from piper.job.pricing import cost_notes, mesh_notes
from piper.job.stage_weights import stage_table
from piper.strategies import draw, to_table
from piper.view.division import division
from piper.view.footprint import footprint
from piper.view.message_orders import message_orders
from piper.view.offload import offload
from piper.view.overlap import overlap
from piper.view.recomputation import recomputation
from piper.view.schedule_grid import grid, summary
from piper.view.schedule_svg import svg as picture

if TYPE_CHECKING:
    from piper.job.inspection import Inspected

Target = Annotated[Path, typer.Argument(exists=True, dir_okay=False)]


def add_to(app: typer.Typer) -> None:
    app.command("show", context_settings=PASS_ON)(show)


def show(
    context: typer.Context,
    target: Target,
    dag: Annotated[bool, typer.Option("--dag", help="print the final training DAG")] = False,
    plan: Annotated[int | None, typer.Option(help="print the plan of this device")] = None,
    svg: Annotated[Path | None, typer.Option(help="write the schedule as a picture")] = None,
    after: Annotated[
        int | None, typer.Option(help="print the DAG after this many directives")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="warn if another mesh suits it: h100, ..., or a file")
    ] = None,
    per_node: Annotated[int | None, typer.Option(help="the same: devices per node", min=1)] = None,
) -> None:
    """Show TARGET: a training script (.py), a strategy (.json) or a schedule (.csv)."""
    if target.suffix in (".json", ".csv"):
        show_strategy(target)
        return
    found = inspect(target, context.args)
    if after is not None:
        directives = found.compiled.program[: whole_number("--after", after)]
        model = found.captured.model_with(policies_of(found.compiled.program))
        print(text(apply(directives, training_dag(model))))
    elif svg is not None:
        write_text(svg, picture(found.compiled.dag))
    elif plan is not None:
        print(found.compiled.plan(device_of(found, plan)))
    elif dag:
        print(text(found.compiled.dag))
    else:
        show_schedule(found)
        if stages := stage_table(found.compiled):
            print(stages)
        print(footprint(found.compiled.dag, found.compiled.plans, found.compiled.roles))
        if divided := division(found.compiled.dag.model):
            print(divided)
        if ordered := message_orders(found.compiled.dag):
            print(ordered)
        if again := recomputation(found.compiled.dag):
            print(again)
        if away := offload(found.compiled.dag, found.compiled.plans):
            print(away)
        if shares := found.compiled.dag.streams:
            print(f"streams: {', '.join(map(str, shares))}")
        if hidden := overlap(found.compiled.dag):
            print("\n".join([hidden, *cost_notes(found.compiled)]))
        if between := chosen_network(network, per_node):
            for note in mesh_notes(found.compiled, between):
                print(note)


def device_of(found: Inspected, device: int) -> int:
    count = len(found.compiled.roles.of)
    if not 0 <= device < count:
        fix = f"write one of 0 to {count - 1}" if count > 1 else "write --plan 0"
        raise InputError.of("--plan", f"the strategy has no device {device}", fix)
    return device


def whole_number(option: str, number: int) -> int:
    if number < 0:
        raise InputError.of(option, f"{number} directives", "write a number from 0 on")
    return number


def show_schedule(found: Inspected) -> None:
    """A grid over time. With sharded experts and orders, the slots of the orders instead."""
    dag, strategy = found.compiled.dag, found.job.strategy
    if dag.shardings and any(isinstance(one, Order) for one in strategy):
        with suppress(StrategyError):  # not a pipeline schedule
            print(draw(to_table(strategy)))
            return
    console = Console(soft_wrap=True)
    console.print(grid(dag, colour=console.is_terminal), highlight=False)
    print(summary(dag))


def show_strategy(target: Path) -> None:
    """The schedule table of a .csv file, the directives of a .json file."""
    strategy = strategy_of(target)
    print(draw(to_table(strategy)) if target.suffix == ".csv" else strategy)
