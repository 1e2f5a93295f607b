"""piper show: a strategy's schedule, DAG or plans as text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piper.cli.files import OUTPUT, printed_to, write_text
from piper.cli.passed_on import add_command, refuse_arguments
from piper.cli.simulate import (
    DeviceOption,
    SimulatedMachine,
    inspected_for,
    machine_of,
)
from piper.cli.target import Target, strategy_of
from piper.cli.terminal import Devices, Steps, show_lines, show_rows, show_text, window_of
from piper.cli.usage import usage
from piper.directives import Directive, Order, Strategy, apply
from piper.directives.remat import policies_of
from piper.errors import InputError, StrategyError
from piper.ir.by_device.schedule_rows import Rows, dag_rows
from piper.ir.maker import ORDER, Maker
from piper.ir.message_order import names_operations
from piper.ir.text.text import text
from piper.ir.training import training_dag
from piper.job.compile.pricing import cost_notes, mesh_notes
from piper.job.compile.stage_weights import stage_table
from piper.job.compile.whole_model import whole_model_lines
from piper.names import STEP
from piper.sim.report import report
from piper.strategies.timing import compiled_rows, strategy_rows
from piper.view.reports.division import division
from piper.view.reports.footprint import footprint
from piper.view.reports.implied_orders import implied_orders
from piper.view.reports.message_orders import message_orders
from piper.view.reports.offload import offload
from piper.view.reports.overlap import overlap
from piper.view.reports.recomputation import recomputation
from piper.view.reports.simulation_text import idle_text, waits_text
from piper.view.schedule_grid import Window
from piper.view.schedule_svg import svg as picture

if TYPE_CHECKING:
    from piper.job.compile.compiler import Compiled
    from piper.job.inspection import Inspected

Network = Annotated[
    str | None,
    typer.Option(help="warn if another mesh suits this network better: h100, ..., or a file"),
]
OfDevice = Annotated[
    int | None,
    typer.Option(
        metavar="DEVICE",
        help="print the instructions of this device; `after 7` waits for number 7",
    ),
]
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".pdf", ".html")
PerNode = Annotated[int | None, typer.Option(help="devices per node, for --network", min=1)]
OutputOption = Annotated[
    Path | None,
    typer.Option(*OUTPUT, help="write what is shown to this file; in an .svg, the picture"),
]


def add_to(app: typer.Typer) -> None:
    add_command(app, "show", show)


def show(
    context: typer.Context,
    target: Target,
    dag: Annotated[bool, typer.Option("--dag", help="print the final training DAG")] = False,
    plan: OfDevice = None,
    svg: Annotated[Path | None, typer.Option(help="write the schedule as a picture")] = None,
    after: Annotated[
        int | None, typer.Option(help="print the DAG after this many directives")
    ] = None,
    steps: Steps = None,
    devices: Devices = None,
    device: DeviceOption = None,
    network: Network = None,
    per_node: PerNode = None,
    output: OutputOption = None,
) -> None:
    """Show TARGET: its schedule over time, and what each device holds and sends.

    Nothing is trained. With --device, stages are cut and work is ordered as on such GPUs. Arguments
    after TARGET are passed on to the script, and so is a --steps that is a plain number. Write `--`
    before options of the script that are named like these.

    Example: piper show train.py --devices 0-3
    """
    if output is not None and output.suffix == ".svg":
        svg, output = output, None
    refuse_pictures(svg, output, [plan is not None, dag, after is not None])
    if target.suffix in (".json", ".csv"):
        refuse_arguments(target, context.args)
        with printed_to(output):
            show_strategy(target, svg, window_of(steps, devices, output))
        return
    words = context.args
    if steps is not None and steps.isdecimal():
        words, steps = [*words, "--steps", steps], None
    window = window_of(steps, devices, output)
    machine = machine_of(device, None, network, per_node)
    found = inspected_for(machine, target, words)
    refuse_other_devices(found, window)
    with printed_to(output):
        if after is not None:
            print(dag_after(found, whole_number("--after", after)))
        elif svg is not None:
            draw(svg, dag_rows(found.compiled.dag))
        elif plan is not None:
            print(found.compiled.plan(device_of(found, plan)))
        elif dag:
            print(text(found.compiled.dag))
        else:
            show_all(found, machine, window)


def show_all(found: Inspected, machine: SimulatedMachine, window: Window) -> None:
    show_rows(compiled_rows(found.job.strategy, found.compiled.dag), window, machine=True)
    show_text(simulated_lines(found.compiled, machine), window)
    show_sections(found.compiled, window)
    show_lines(whole_model_lines(found.job.strategy, found.captured), window)
    show_mesh(found.compiled, machine, window)


def refuse_other_devices(found: Inspected, window: Window) -> None:
    for one in window.devices or ():
        device_of(found, one, "--devices")


def dag_after(found: Inspected, directives: int) -> str:
    program = found.compiled.program
    model = found.captured.model_with(policies_of(program))
    return text(apply(program[:directives], training_dag(model)))


def show_mesh(compiled: Compiled, machine: SimulatedMachine, window: Window) -> None:
    if machine.network is not None:
        show_lines(mesh_notes(compiled, machine.network), window)


def show_sections(compiled: Compiled, window: Window) -> None:
    """What is there to say of the strategy, besides its schedule."""
    dag, plans = compiled.dag, compiled.plans
    show_lines(stage_table(compiled).splitlines(), window)
    held = footprint(dag, plans, compiled.roles, window.devices, compiled.optimizer)
    show_lines(held.splitlines(), window)
    for section in (division(dag.model), message_orders(dag), recomputation(dag)):
        show_text(section, window)
    orders = orders_of_passes(compiled.program), orders_of_messages(compiled.program)
    show_text(implied_orders(dag, *orders), window)
    show_text(offload(dag, plans), window)
    if shares := dag.streams:
        show_text(f"streams: {', '.join(map(str, shares))}", window)
    if hidden := overlap(dag):
        show_lines([*hidden.splitlines(), *cost_notes(compiled)], window)


def orders_of_passes(program: Sequence[Directive]) -> list[Maker]:
    """Orders that name nothing but passes of this step, each before the next."""
    found = makers_of_orders(program)
    return [maker for maker, order in found if not order.ahead and not names_more(order)]


def orders_of_messages(program: Sequence[Directive]) -> list[Maker]:
    """Orders that name messages, updates or the next step."""
    return [maker for maker, order in makers_of_orders(program) if names_more(order)]


def makers_of_orders(program: Sequence[Directive]) -> list[tuple[Maker, Order]]:
    return [
        (Maker(ORDER, number, len(program)), one)
        for number, one in enumerate(program, start=1)
        if isinstance(one, Order) and len(one.steps) > 1
    ]


def names_more(order: Order) -> bool:
    return any(names_operations(f) or STEP in f.keys for slot in order.steps for f in slot)


def simulated_lines(compiled: Compiled, machine: SimulatedMachine) -> str:
    """The figure that `piper simulate` and `piper view` give with the same --device."""
    step, _ = machine.price(compiled)
    found = report(step)
    costs = f"on {machine.words(compiled)}, with communication"
    idle = f"{costs}: {idle_text(found)}; `piper simulate` says why"
    return f"{idle}\n{waits_text(found)}".rstrip()


@usage()
def refuse_pictures(svg: Path | None, output: Path | None, texts: Sequence[bool]) -> None:
    """Pictures of another kind, or of what is a text."""
    if svg is not None and svg.suffix != ".svg":
        raise InputError.of("--svg", f"{svg} is no .svg", f"write --svg {svg.with_suffix('.svg')}")
    if output is not None and output.suffix in PICTURES:
        fix = f"write -o {output.with_suffix('.svg')} for the picture, or a name that ends in .txt"
        raise InputError.of("--output", f"{output} would be a text", fix)
    if svg is not None and any(texts):
        fix = "leave out the .svg, or --plan, --dag and --after; -o FILE.txt keeps their text"
        raise InputError.of("--svg", "a plan or a DAG is no picture", fix)


@usage()
def device_of(found: Inspected, device: int, option: str = "--plan") -> int:
    count = len(found.compiled.roles.of)
    if not 0 <= device < count:
        fix = f"write one of 0 to {count - 1}" if count > 1 else f"write {option} 0"
        raise InputError.of(option, f"the strategy has no device {device}", fix)
    return device


@usage()
def whole_number(option: str, number: int) -> int:
    if number < 0:
        raise InputError.of(option, f"{number} directives", "write a number from 0 on")
    return number


def draw(path: Path, rows: Rows) -> None:
    write_text(path, picture(rows))
    print(f"{path}: open it in a browser")


def show_strategy(target: Path, svg: Path | None, window: Window) -> None:
    """The schedule of a file, if it has one, and its other directives."""
    strategy = strategy_of(target)
    if svg is not None:
        draw(svg, strategy_rows(strategy))
        return
    with suppress(StrategyError):  # not a pipeline schedule
        show_rows(strategy_rows(strategy), window)
        strategy = Strategy(tuple(one for one in strategy if not isinstance(one, Order)))
    show_text(str(strategy), window)
