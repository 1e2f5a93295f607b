"""Measure what a model takes on this machine, in one process: a file of costs for the simulator."""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from piper.directives import Order, Place, Split, Strategy
from piper.errors import InputError, Problem
from piper.ir.costs import Costs
from piper.ir.filters import where
from piper.ir.model import Model
from piper.job.assignment import assignment
from piper.job.batch import Batch
from piper.job.job import Job
from piper.job.pricing import Prices, costs_of_device
from piper.job.programs import load
from piper.launch.local import run_local
from piper.names import BI, BW, F
from piper.plan.instructions import Add, Free, Instruction, Load, Run, Total, Update
from piper.runtime.comm.threads import Hub, ThreadComm
from piper.runtime.observe import probe
from piper.runtime.observe.step_timing import stepwatch
from piper.runtime.state.device_state import DeviceState
from piper.sim.devices import DEVICES
from piper.sim.topology import NETWORKS

LOG = logging.getLogger("piper")
Timed = list[tuple[Instruction, float, float]]  # its seconds, and its bytes
ROUNDS = 7
MOST = 16  # processes that measure cores together


def profile(job: Job, example: Batch) -> Costs:
    """What each pass of each region takes, and what the machine does besides.

    Everything runs in this process, as if all were on one device: whole backwards, then both
    halves. Equal regions share a figure. Links and cores are measured by processes of their own;
    those of GPUs are as on their data sheet.
    """
    seen = [row for halves in (False, True) for row in measured(job, example, halves)]
    model = job.capture(example).model
    codes = {str(region.id): region.code for region in model.regions}
    if job.device.type == "cuda":
        found = {name: figure for name, figure in figures(seen, codes).items() if figure}
        return replace(gpu_costs(kind_of(job.device), model), **found)
    idle = [seconds for one, seconds, _ in seen if isinstance(one, Load | Free)]
    return replace(machine(), **figures(seen, codes), each=statistics.median(idle))


def measured(job: Job, example: Batch, halves: bool) -> Timed:
    """Some steps with two microbatches on one device."""
    parts = 2 - job.microbatches % 2
    alone = job.under(one_device(parts, halves))
    batch = example.part(0, job.microbatches // parts)
    captured, compiled = alone.compile(batch)
    plan, size = compiled.plan(0), Prices(compiled.dag, Costs()).size
    mine, comm = assignment(captured, compiled, 0), ThreadComm(Hub(1), 0)
    program = load(alone, mine, captured.kernels, DeviceState(alone.device), comm)
    step, own = stepwatch(program), alone.weights(batch)
    inputs = alone.inputs(batch, alone.reduction.shares(own, sum(own)), captured.ignored)
    steps = [step(inputs) for _ in range(ROUNDS + 2)][2:]
    sizes = [sum(map(size, touched(one))) for one in plan.instructions]
    return [row for seconds in steps for row in zip(plan.instructions, seconds, sizes, strict=True)]


def touched(one: Instruction) -> tuple[str, ...]:
    """What an instruction goes through, besides regions."""
    match one:
        case Add():
            return (one.value,)
        case Update():
            return (f"w:{one.bucket}",)
        case Total():
            return one.grads
        case _:
            return ()


def one_device(parts: int, halves: bool) -> Strategy:
    """Everything on one device."""
    passes = tuple((where(PASS=str(phase)),) for phase in (F, BI, BW))
    order = [Order(passes)] if halves else []
    return Strategy([Place(where(), (0,)), Split("MB", parts), *order])


def figures(seen: Timed, codes: Mapping[str, str]) -> dict[str, Any]:
    """Medians of passes; of the rest, seconds for each byte."""
    runs: dict[str, list[float]] = {}
    for one, seconds, _ in seen:
        if isinstance(one, Run):
            runs.setdefault(f"{codes[one.region]} {one.phase}", []).append(seconds)
    return {
        "compute": {name: statistics.median(times) for name, times in sorted(runs.items())},
        "add": per_byte(seen, Add),
        "square": per_byte(seen, Total),
        "update": per_byte(seen, Update),
    }


def per_byte(seen: Timed, kind: type[Instruction]) -> float:
    """Of all of a kind together: small ones cost more than their bytes."""
    rows = [(seconds, size) for one, seconds, size in seen if isinstance(one, kind)]
    total = sum(size for _, size in rows)
    return sum(seconds for seconds, _ in rows) / total if total else 0.0


def kind_of(device: torch.device) -> str | None:
    """What the data sheets call it, if they know it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((kind for kind in DEVICES if kind in name), None)


def gpu_costs(kind: str | None, model: Model) -> Costs:
    """What is known of a GPU besides what is measured."""
    if kind is None:
        LOG.warning("nothing is known of the links of this GPU: say --network")
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
