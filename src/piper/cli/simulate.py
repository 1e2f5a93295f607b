"""piper simulate: predict the step time and memory of a strategy, before it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piper.cli.files import OUTPUT, is_file, printed_to, read_as, write_text, writing
from piper.cli.passed_on import add_command
from piper.cli.sweep import settings_of, sweep
from piper.cli.target import Script, inspect
from piper.cli.terminal import show_text, window_of
from piper.cli.usage import named_device, refuse_one_step, refuse_plot, refuse_two_costs, usage
from piper.costs import Costs, one_core
from piper.costs.device_lists import devices_by_name
from piper.costs.devices import (
    DeviceKind,
    costs_of_device,
    dtype_of,
    of_each_device,
)
from piper.costs.links import NETWORKS, Network
from piper.errors import StrategyError, did_you_mean, nearest
from piper.ir.model import Model
from piper.job.compile.pricing import JobCosts, device_costs, predict, price
from piper.names import Device, amount
from piper.sim.clock import Simulated
from piper.sim.prediction import Prediction
from piper.strategies.cuts import seconds_of
from piper.view.page import page
from piper.view.reports.device_kinds import kind_lines
from piper.view.reports.recomputation import recomputation
from piper.view.reports.simulation_text import text
from piper.view.reports.sweep import SweepResult, plot, ranked, same_line
from piper.view.reports.sweep import table as sweep_table
from piper.view.run_file import save_view
from piper.view.view_data import ViewData, view_data

if TYPE_CHECKING:
    from piper.job.compile.compiler import Compiled
    from piper.job.inspection import Inspected

CPU = "cpu"
OWN_COSTS = "the Trainer's costs"
MEASURE = "measure: `piper simulate train.py --profile costs.json`"


class Sort(StrEnum):
    """What a sweep minimizes."""

    STEP = "step"
    MEMORY = "memory"


Listed = tuple[Device, ...]  # nothing: all devices
DeviceOption = Annotated[
    str | None,
    typer.Option(help="h100, h200, h800, a100 or cpu; or several: h200:0-3,a100:4-7"),
]
CostsOption = Annotated[
    str | None,
    typer.Option(help="a file of measured costs; or several: big.json:0-3,small.json:4-7"),
]
NetworkOption = Annotated[str | None, typer.Option(help="a name like those of --device, or a file")]
PerNodeOption = Annotated[int | None, typer.Option(help="devices per node", min=1)]
StateOption = Annotated[
    float | None,
    typer.Option(
        help="size of its state, in multiples of the parameters (Adam: 2); else the script's",
        min=0.0,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        *OUTPUT,
        help="write the result to this file: as --json, --view or --plot if its ending is theirs",
    ),
]


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """The hardware to simulate. What is not given is as the strategy was compiled."""

    kinds: tuple[tuple[DeviceKind, Listed], ...] = ()  # from data sheets
    costs: tuple[tuple[Costs, Listed], ...] = ()  # measured; they replace data sheets
    network: Network | None = None
    optimizer: float | None = None  # size of its state; None: that of the script's
    label: str = OWN_COSTS
    compiled_with: Costs | str | None = None  # stages are cut by them, as by `Trainer(costs=...)`
    names: tuple[tuple[str, Listed], ...] = ()  # of kinds or files, where there are several

    def words(self, compiled: Compiled) -> str:
        """The machine. The Trainer's costs may be those of the GPU that it found."""
        own = f"{OWN_COSTS} ({compiled.costs.words})"
        return self.label.replace(OWN_COSTS, own, 1)

    def memory(self, count: int) -> float | dict[Device, float] | None:
        """Of all devices, or of each."""
        if len(self.kinds) > 1:
            found = of_each_device(self.kinds, count)
            return {device: kind.memory for device, kind in enumerate(found)}
        return self.kinds[0][0].memory if self.kinds else None

    def costs_of(self, model: Model, count: int) -> JobCosts | None:
        """Of all devices, or of each."""
        found = self.costs or tuple(self.from_data_sheets(model))
        if len(found) > 1:
            return of_each_device(found, count)
        return found[0][0] if found else None

    def from_data_sheets(self, model: Model) -> Iterator[tuple[Costs, Listed]]:
        for kind, devices in self.kinds:
            assert self.network is not None
            yield costs_of_device(kind, model, self.network), devices

    def price(self, compiled: Compiled) -> tuple[Simulated, Prediction]:
        count = len(compiled.roles.of)
        costs = self.costs_of(compiled.dag.model, count)
        found = price(compiled, costs, self.network)
        ahead = next(iter(device_costs(compiled, costs).values())).ahead
        staging = 0 if ahead else 1  # only gloo copies gradients
        memory = self.memory(count)
        state = self.state(compiled)
        prediction = predict(compiled, found, costs, memory, state, staging, self.network)
        notes = (*prediction.notes, *self.kind_notes(compiled, costs, prediction))
        peak = self.peak_flops(compiled.dag.model, count)
        return found, replace(prediction, peak_flops=peak, notes=notes)

    def state(self, compiled: Compiled) -> float:
        """The size of the optimizer's state, in multiples of the parameters."""
        return compiled.optimizer if self.optimizer is None else self.optimizer

    def kind_notes(
        self, compiled: Compiled, costs: JobCosts | None, found: Prediction
    ) -> Iterator[str]:
        if len(self.names) < 2:
            return
        each = device_costs(compiled, costs)
        kinds, model = of_each_device(self.names, len(each)), compiled.dag.model
        first = {name: each[kinds.index(name)] for name in dict.fromkeys(kinds)}
        seconds = {name: sum(seconds_of(model, one).values()) for name, one in first.items()}
        yield from kind_lines(found, kinds, seconds)

    def peak_flops(self, model: Model, count: int) -> float | None:
        """Of all devices together, by their data sheets."""
        if not self.kinds:
            return None
        found, dtype = of_each_device(self.kinds, count), dtype_of(model)
        return sum(kind.flops.get(dtype, kind.flops["float32"]) for kind in found)


@dataclass(frozen=True, slots=True)
class Files:
    """What to write, besides or instead of the text on stdout."""

    page: Path | None = None
    chrome: Path | None = None
    numbers: Path | None = None  # JSON
    plot: Path | None = None  # of a sweep
    text: Path | None = None


def by_ending(output: Path | None, files: Files) -> Files:
    """With a file whose ending says what it is."""
    match output.suffix if output else None:
        case ".json":
            return replace(files, numbers=output)
        case ".html":
            return replace(files, page=output)
        case ".svg":
            return replace(files, plot=output)
    return replace(files, text=output)


def add_to(app: typer.Typer) -> None:
    add_command(app, "simulate", simulate)


def simulate(
    context: typer.Context,
    target: Script,
    device: DeviceOption = None,
    costs: CostsOption = None,
    profile: Annotated[
        Path | None, typer.Option(help="measure costs on this machine, and write them to this file")
    ] = None,
    network: NetworkOption = None,
    per_node: PerNodeOption = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="values of an argument of the script: name=4,8,16"),
    ] = None,
    sort: Annotated[Sort, typer.Option(help="what a sweep is sorted by")] = Sort.STEP,
    plot: Annotated[Path | None, typer.Option(help="draw the sweep, in this .svg file")] = None,
    view: Annotated[
        Path | None, typer.Option(help="write a page of the step, in this .html file")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="write a trace for Perfetto, in this .json file")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write all numbers to this file")] = None,
    optimizer: StateOption = None,
    output: OutputOption = None,
) -> None:
    """Predict how long a step of SCRIPT takes, what bounds it, and how much memory it needs.

    SCRIPT runs up to its Trainer. Nothing is trained, so models on `meta` may have any size.
    Arguments after SCRIPT are passed on to it. Write `--` before options of the script that are
    named like these. With --set, all combinations are simulated.

    Example: piper simulate train.py --device h200 --set microbatches=4,8,16
    """
    if profile is not None:
        refuse_two_costs(device, costs)
        network = measure(target, context.args, profile, network)
    measured = str(profile) if profile is not None else costs
    machine = machine_of(device, measured, network, per_node, optimizer)
    files = by_ending(output, Files(view, chrome, json, plot))
    if sets:
        refuse_one_step(files.page, files.chrome)
        found = sweep(partial(simulated, target, machine, context.args), settings_of(sets))
        show_sweep(found, sort, files)
    else:
        refuse_plot(files.plot)
        show_step(target, context.args, machine, files)


def measure(target: Path, arguments: Sequence[str], into: Path, network: str | None) -> str | None:
    """Measure the script's model on this machine. Costs of other models in the file stay.

    One GPU cannot measure a network. Returns the network of its kind, unless another is given.
    """
    from piper.job.device_costs import kind_of
    from piper.job.programs.profiling import profile

    found = inspect(target, list(arguments))
    print("measuring every region in one process, then links between processes ...", flush=True)
    new = profile(found.job, found.example)
    known = read_as(into, Costs.from_json, MEASURE).figures if into.exists() else {}
    write_text(into, replace(new, figures=known).with_figures(new.figures).to_json())
    print(f"wrote {into}: {amount(len(new.figures), 'cost')} of regions and phases", flush=True)
    return network or kind_of(found.job.device)


def machine_of(
    device: str | None,
    costs: str | None,
    network: str | None,
    per_node: int | None,
    optimizer: float | None = None,
) -> SimulatedMachine:
    """The machine that the options describe. A device implies the network of its kind."""
    measured = tuple(measured_costs(costs)) if costs else ()
    if device == CPU:
        measured = measured or ((one_core(), ()),)
    with usage():
        named = devices_by_name(device) if device not in (None, CPU) else {}
    kinds = tuple((named_device(name), devices) for name, devices in named.items())
    name = network or slowest_network(list(named))
    between = chosen_network(name, per_node)
    alone = measured[0][0] if len(measured) == 1 and not measured[0][1] else None
    cut_by = alone or costs or device
    label = label_of(device, costs, network, per_node)
    names = named or (devices_by_name(costs) if costs and len(measured) > 1 else {})
    return SimulatedMachine(kinds, measured, between, optimizer, label, cut_by, (*names.items(),))


def label_of(
    device: str | None, costs: str | None, network: str | None, per_node: int | None
) -> str:
    """The machine in the words of the options.

    >>> label_of("h200", None, None, 8)
    'the data sheet of h200, 8 devices in a node'
    """
    words = []
    if costs is not None or device is None:
        words.append(f"the costs in {costs}" if costs else SimulatedMachine().label)
    if device is not None:
        words.append(f"the data sheet of {device}" if device != CPU else "the costs of one core")
    words += [f"network {network}"] if network else []
    return ", ".join([*words, *([f"{per_node} devices in a node"] if per_node else [])])


def measured_costs(text: str) -> Iterator[tuple[Costs, Listed]]:
    """The costs of a file, or of several, with their devices."""
    files = {text: ()} if is_file(Path(text)) else devices_by_name(text)
    for name, devices in files.items():
        if not is_file(Path(name)):
            with usage():
                raise StrategyError.of("costs", f"there is no file {name!r}", MEASURE)
        yield read_as(Path(name), Costs.from_json, MEASURE), devices


def slowest_network(names: Sequence[str]) -> str | None:
    """Of the networks of several kinds of devices, the one with the slowest links between nodes."""
    known = [name for name in names if name in NETWORKS]
    return min(known, key=lambda name: NETWORKS[name].between.bandwidth, default=None)


def chosen_network(name: str | None, per_node: int | None) -> Network | None:
    """A network by name or file, in nodes of so many devices; None if neither is given."""
    between = network_of(name) if name else None
    if per_node is not None:
        return replace(between or Network(), per_node=per_node)
    return between


def network_of(name: str) -> Network:
    if name in NETWORKS:
        return NETWORKS[name]
    if not is_file(Path(name)):
        near = did_you_mean(nearest(name.lower(), list(NETWORKS)))
        fix = f"choose one of {', '.join(NETWORKS)}, or give a file (see docs/simulate.md){near}"
        with usage():
            raise StrategyError.of("network", f"there is no network {name!r}", fix)
    return read_as(Path(name), Network.from_json, "see docs/simulate.md for its form")


def inspected_for(machine: SimulatedMachine, target: Path, arguments: Sequence[str]) -> Inspected:
    """What a script trains, with the operators that these devices would run."""
    from piper.capture.trace.gpu_kernels import as_on_gpu

    with as_on_gpu(bool(machine.kinds) and not machine.costs):
        return inspect(target, list(arguments), costs=machine.compiled_with)


def simulated(
    target: Path, machine: SimulatedMachine, arguments: Sequence[str], more: Sequence[str]
) -> Prediction:
    """One combination of a sweep."""
    return machine.price(inspected_for(machine, target, [*arguments, *more]).compiled)[1]


def show_step(
    target: Path, arguments: Sequence[str], machine: SimulatedMachine, files: Files
) -> None:
    compiled = inspected_for(machine, target, arguments).compiled
    step, found = machine.price(compiled)
    window = window_of(None, None, files.text)
    with printed_to(files.text):
        show_text(text(found, step, machine.words(compiled)), window)
        if again := recomputation(compiled.dag):
            show_text(f"\n{again}", window)
    if files.chrome is not None or files.page is not None:
        data = view_data(
            target.stem, compiled.dag, step.plans, [step.trace], notes=found.notes,
            machine=machine.words(compiled), optimizer=machine.state(compiled),
        )  # fmt: skip
        write_views(files, data)
    if files.numbers is not None:
        write_text(files.numbers, json.dumps(found.to_dict(), indent=1) + "\n")


def write_views(files: Files, data: ViewData) -> None:
    if files.page is not None:
        write_text(files.page, page([data]))
    if files.chrome is not None:
        with writing(files.chrome):
            save_view(files.chrome, data)


def show_sweep(results: list[SweepResult], sort: Sort, files: Files) -> None:
    found = ranked(results, sort)
    with printed_to(files.text):
        print(sweep_table(found))
        if note := same_line(found):
            print(note)
    if files.plot is not None:
        write_text(files.plot, plot(found))
    if files.numbers is not None:
        write_text(files.numbers, json.dumps([row.to_dict() for row in found], indent=1) + "\n")
    if not any(row.found for row in found):
        raise typer.Exit(1)  # each row says why
