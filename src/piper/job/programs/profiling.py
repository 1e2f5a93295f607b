"""Measure the costs of a model on this machine, in one process, for the simulator."""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from piper.costs import Costs
from piper.costs.devices import DEVICES, costs_of_device
from piper.costs.links import NETWORKS
from piper.costs.measured import CodePhase, figures_of, medians, works_of
from piper.costs.modes import mode_of
from piper.directives import Directive, Order, Place, Remat, Split, Stage, Strategy, apply
from piper.directives.remat import policies_of
from piper.errors import InputError, Problem
from piper.ir.filters import where
from piper.ir.model import Model
from piper.ir.training import training_dag
from piper.job.batch.batch import Batch
from piper.job.compile.assignment import assignment
from piper.job.compile.pricing import Prices
from piper.job.device_costs import kind_of
from piper.job.job import Job
from piper.job.programs.programs import load
from piper.launcher.local import run_local
from piper.names import BI, BW, F, Phase, RegionId
from piper.plan.instructions import Add, Free, Instruction, Load, Run, Total, Update
from piper.runtime.comm.threads import Hub, ThreadComm
from piper.runtime.observe import probe
from piper.runtime.observe.step_timing import stepwatch
from piper.runtime.state.device_state import DeviceState

LOG = logging.getLogger("piper")
Timed = list[tuple[Instruction, float, float]]  # instruction, seconds, bytes
ROUNDS = 7
MOST = 16  # processes, at most, that measure cores together


def profile(job: Job, example: Batch) -> Costs:
    """Measure every phase of every region, and the other costs of the machine.

    Regions run in this process, all on one device: with whole backwards, then with BI and BW. Equal
    regions share a measurement. Regions under `Remat` are recomputed here, too. Other processes
    measure links and cores. Links of GPUs come from their data sheet.
    """
    with threads_of_a_run(job.strategy):
        seen = [row for halves in (False, True) for row in measured(job, example, halves)]
    model = job.capture_whole(example).model_with(policies_of(job.strategy))
    dag = apply(recomputed(job.strategy), training_dag(model))
    model, mode = dag.model, mode_of(job.options.compiled)
    figures = figures_of(works_of(model), medians(runs(seen, model)), mode)
    kinds = {"add": Add, "square": Total, "update": Update}
    rest: dict[str, Any] = {name: per_byte(seen, kind) for name, kind in kinds.items()}
    if job.device.type == "cuda":
        found = {name: seconds for name, seconds in rest.items() if seconds}
        known = gpu_costs(kind_of(job.device), model)
        return replace(known, figures=figures, mode=mode, **found)
    idle = [seconds for one, seconds, _ in seen if isinstance(one, Load | Free)]
    return replace(machine(), figures=figures, mode=mode, **rest, each=statistics.median(idle))


@contextmanager
def threads_of_a_run(strategy: Strategy) -> Iterator[None]:
    """Of several processes, each has one thread, unless the environment says something else. Where
    others use the cores, more of them would wait for each other, and measure that."""
    before = torch.get_num_threads()
    if len(strategy.devices) > 1:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured(job: Job, example: Batch, halves: bool) -> Timed:
    """Time some steps with up to two microbatches on one device."""
    parts = 2 - job.microbatches % 2
    alone = job.under(one_device(parts, halves) + recomputed(job.strategy)).without_limit()
    batch = example.part(0, job.microbatches // parts)
    captured, compiled = alone.compile(batch)
    plan, prices = compiled.plan(0), Prices(compiled.dag, Costs(), compiled.plans)
    mine, comm = assignment(captured, compiled, 0), ThreadComm(Hub(1), 0)
    program = load(alone, mine, captured.kernels, DeviceState(alone.device), comm)
    step, reduction = stepwatch(program), alone.reduction(captured.form)
    own = alone.weights(reduction, batch)
    inputs = alone.inputs(batch, reduction.shares(own, sum(own)))
    steps = [step(inputs) for _ in range(ROUNDS + 2)][2:]
    sizes = [
        prices.bytes_processed(one) if isinstance(one, Add | Update | Total) else 0.0
        for one in plan.instructions
    ]
    return [row for seconds in steps for row in zip(plan.instructions, seconds, sizes, strict=True)]


def one_device(parts: int, halves: bool) -> Strategy:
    """Everything on one device."""
    passes = tuple((where(PASS=str(phase)),) for phase in (F, BI, BW))
    order = [Order(passes)] if halves else []
    return Strategy([Place(where(), (0,)), Split("MB", parts), *order])


def recomputed(strategy: Strategy) -> list[Directive]:
    """What is recomputed, after the stages that it may be named by."""
    return [
        one
        for one in strategy
        if isinstance(one, Stage) or (isinstance(one, Remat) and not one.is_auto)
    ]


def runs(seen: Timed, model: Model) -> Iterator[tuple[CodePhase, float]]:
    """Seconds of each run of a region, by code. Equal regions have the same code."""
    for one, seconds, _ in seen:
        if isinstance(one, Run):
            yield (model.by_id[RegionId(one.region)].code, Phase(one.phase)), seconds


def per_byte(seen: Timed, kind: type[Instruction]) -> float:
    """Seconds per byte, over all instructions of a kind."""
    rows = [(seconds, size) for one, seconds, size in seen if isinstance(one, kind)]
    total = sum(size for _, size in rows)
    return sum(seconds for seconds, _ in rows) / total if total else 0.0


def gpu_costs(kind: str | None, model: Model) -> Costs:
    """Costs of a GPU that are not measured."""
    if kind is None:
        LOG.warning("the links of this GPU are not known: give --network")
        return Costs(ahead=True)
    return costs_of_device(DEVICES[kind], model, NETWORKS[kind])


def machine() -> Costs:
    """Links and cores of this machine, measured by twice as many processes as it has cores."""
    count = min(MOST, 2 * (os.cpu_count() or 1))
    with tempfile.TemporaryDirectory(prefix="piper-") as folder:
        path = Path(folder) / "machine.json"
        script = str(Path(probe.__file__).with_name("run.py"))
        if run_local(script, [str(path)], count, {"OMP_NUM_THREADS": "1"}):
            problem = Problem("the links of this machine could not be measured", "see above why")
            raise InputError("profile", problem)
        return Costs(**json.loads(path.read_text()))
