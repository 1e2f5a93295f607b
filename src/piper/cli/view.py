"""piper view: a strategy or a recorded run as a page, a picture, or a trace for Perfetto."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.files import OUTPUT, damage_reported, is_file, read_text, write_text, writing
from piper.cli.missing import existing, missing
from piper.cli.passed_on import add_command, before_dashes
from piper.cli.simulate import (
    CostsOption,
    DeviceOption,
    NetworkOption,
    PerNodeOption,
    SimulatedMachine,
    inspected_for,
    machine_of,
)
from piper.cli.target import strategy_of
from piper.errors import StrategyError
from piper.job.compile.pricing import price
from piper.job.compile.stage_model import WITHOUT_MODEL, compiled_alone
from piper.view.page import page
from piper.view.run_file import RECORD, load_run, save_view
from piper.view.timeline_picture import png as as_png
from piper.view.timeline_picture import require_matplotlib
from piper.view.timeline_picture import svg as as_svg
from piper.view.view_data import ViewData, view_data

WAYS = (
    "give a .py script that makes a Trainer, a .json that `piper run --trace` wrote, a strategy "
    ".json, or a schedule .csv"
)
TARGETS = "a training script (.py), a recorded run (.json), a strategy (.json) or a schedule (.csv)"
SHOWN = (".py", ".json", ".csv")
NO_NAME, LONGEST = re.compile(r"[^\w.=]+"), 40  # of arguments, in the name of a file
VIEWS = ("", ".html", ".htm", ".svg", ".png")


def ending(suffix: str) -> Callable[[Path | None], Path | None]:
    """A check of a file that is written: its name says what is in it."""

    def checked(file: Path | None) -> Path | None:
        if file is not None and file.suffix.lower() not in ("", suffix):
            meant = file.with_suffix(suffix)
            raise typer.BadParameter(f"{file} would not be what it is called: write {meant}")
        return file

    return checked


def of_view(file: Path | None) -> Path | None:
    if file is not None and file.suffix.lower() not in VIEWS:
        fix = f"write {file.with_suffix('.html')}, .svg or .png"
        raise typer.BadParameter(f"{file} would not be what it is called: {fix}")
    return file


Page = Annotated[
    Path | None,
    typer.Option(
        *OUTPUT, callback=of_view,
        help="write the page to this file, or a picture if it ends in .svg or .png",
    ),
]  # fmt: skip
Svg = Annotated[
    Path | None,
    typer.Option(help="write a picture of the first step, and no page", callback=ending(".svg")),
]
Png = Annotated[
    Path | None,
    typer.Option(help="write it as PNG (needs matplotlib), and no page", callback=ending(".png")),
]
Chrome = Annotated[Path | None, typer.Option(help="write a trace for Perfetto, and no page")]


def add_to(app: typer.Typer) -> None:
    add_command(app, "view", view)


def view(
    context: typer.Context,
    target: Annotated[
        Path, typer.Argument(dir_okay=False, metavar="TARGET", callback=existing, help=TARGETS)
    ],
    output: Page = None,
    svg: Svg = None,
    png: Png = None,
    chrome: Chrome = None,
    device: DeviceOption = None,
    costs: CostsOption = None,
    network: NetworkOption = None,
    per_node: PerNodeOption = None,
) -> None:
    """Show TARGET in one HTML page that needs no network.

    Arguments after TARGET are passed on to the script. A second target after them is compared with
    the first: `piper view TARGET ARGUMENTS TARGET2 ARGUMENTS2`. Write `--` before options of the
    script that are named like these.

    Nothing is trained. A step is simulated, on the machine that --device or --costs name.

    Example: piper view train.py --device h200 run.json
    """
    output, svg, png = by_ending(output, svg, png)
    if png is not None:
        require_matplotlib(png)
    named = targets(target, context.args)
    refuse_missing(*named[-1], before_dashes(context))
    machine = machine_of(device, costs, network, per_node)
    runs = told_apart([data_of(*one, machine) for one in named], [path for path, _ in named])
    if len(named) == 2 and named[0][0] == named[1][0] and are_equal(*runs):
        print(f"both are the same: does {named[0][0].name} read its arguments, as with argparse?")
    if output is None and not (svg or png or chrome):
        output = page_name(named)
    drawn = [path for path, _ in named if path.suffix == ".json"]  # as their files say
    with damage_reported(drawn[0], RECORD) if drawn else nullcontext():
        if output:
            write_text(output, page(runs))
        if svg:
            write_text(svg, as_svg(runs[0]))
        if png:
            with writing(png):
                as_png(runs[0], png)
        if chrome:
            with writing(chrome):
                save_view(chrome, runs[0])
    for path in filter(None, (output, svg, png, chrome)):
        print(f"{path}: open it in a browser" if path.suffix == ".html" else path)


def page_name(named: Sequence[tuple[Path, Sequence[str]]]) -> Path:
    """The file of a page. Two runs of one script are told apart by their arguments.

    >>> page_name([(Path("a.py"), ["--lr", "1"]), (Path("b.json"), [])])
    PosixPath('a-b.html')
    >>> page_name([(Path("a.py"), []), (Path("a.py"), ["--schedule", "zbv"])])
    PosixPath('a-a-schedule-zbv.html')
    """
    names = [path.stem for path, _ in named]
    if len(names) == 2 and names[0] == names[1]:
        words = (NO_NAME.sub("-", " ".join(words))[:LONGEST].strip("-") for _, words in named)
        names = [
            f"{name}-{more}" if more else name for name, more in zip(names, words, strict=True)
        ]
    return Path(f"{'-'.join(names)}.html")


def are_equal(one: ViewData, other: ViewData) -> bool:
    """Whether both do the same in the same order."""
    ways = [[device.instructions for device in run.devices] for run in (one, other)]
    return one.nodes == other.nodes and ways[0] == ways[1]


def by_ending(
    output: Path | None, svg: Path | None, png: Path | None
) -> tuple[Path | None, Path | None, Path | None]:
    """The page and the pictures: `-o` may name any of them."""
    match output.suffix.lower() if output else "":
        case ".svg":
            return None, output, png
        case ".png":
            return None, svg, output
        case _:
            return output, svg, png


def targets(first: Path, words: list[str]) -> list[tuple[Path, list[str]]]:
    """Split the command line. The second target is a file that is not the value of an option.

    >>> targets(Path("a.py"), ["--schedule", "zbv", "--steps", "3"])
    [(PosixPath('a.py'), ['--schedule', 'zbv', '--steps', '3'])]
    """
    found: list[tuple[Path, list[str]]] = [(first, [])]
    for before, word in zip(["", *words], words, strict=False):
        path = Path(word)
        is_value = before.startswith("-") and "=" not in before and before != "--"
        if len(found) < 2 and path.suffix in SHOWN and is_file(path) and not is_value:
            found.append((path, []))
        elif word != "--":
            found[-1][1].append(word)
    return found


def told_apart(runs: list[ViewData], paths: list[Path]) -> list[ViewData]:
    """A script and a run of it have one name."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    pairs = zip(runs, paths, strict=True)
    return [replace(run, name=f"{run.name} ({path.name})") for run, path in pairs]


def refuse_missing(target: Path, passed: list[str], own: list[str]) -> None:
    """A misspelt second target would silently become an argument of the script.

    `own`: what is before `--`; words after it are arguments, whatever they look like.
    """
    for before, word in zip(["", *passed], passed, strict=False):
        path = Path(word)
        is_name = path.suffix in SHOWN and not word.startswith("-") and not before.startswith("-")
        if is_name and word in own and not os.path.exists(path):
            on = " To pass it on to the script, write it after `--`." * (target.suffix == ".py")
            raise typer.BadParameter(missing(path) + on, param_hint="'TARGET2'")


def data_of(target: Path, words: list[str], machine: SimulatedMachine) -> ViewData:
    """Load a recorded run, or compile and simulate a script or a strategy."""
    if target.suffix not in SHOWN:
        raise StrategyError.of(str(target), f"`{target.suffix}` cannot be shown", WAYS)
    if target.suffix != ".py" and words:
        what = f"only a script takes arguments, and `{words[0]}` is not a file to compare it with"
        raise StrategyError.of(str(target), what, WAYS)
    if target.suffix == ".csv" or is_strategy(target):
        alone = compiled_alone(strategy_of(target), str(target))
        steps = [price(alone).trace]
        return view_data(target.stem, alone.dag, alone.plans, steps, notes=(WITHOUT_MODEL,))
    if target.suffix == ".json":
        return load_run(target)
    found = inspected_for(machine, target, words).compiled
    step, prediction = machine.price(found)
    name = " ".join([target.stem, *words])
    steps, notes = [step.trace], prediction.notes
    on = machine.words(found)
    state = found.optimizer
    return view_data(name, found.dag, step.plans, steps, notes=notes, machine=on, optimizer=state)


def is_strategy(target: Path) -> bool:
    """A list of directives. A recorded run is an object."""
    return target.suffix == ".json" and read_text(target, WAYS).lstrip()[:1] == "["
