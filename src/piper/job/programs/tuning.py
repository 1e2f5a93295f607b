"""Turn the measurements of all devices into costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from piper.costs import Costs
from piper.costs.estimate import Work
from piper.costs.measured import Works, figures_of, medians, works_of
from piper.costs.modes import Mode
from piper.ir.model import Model
from piper.job.job import BatchKind
from piper.job.programs.programs import Programs
from piper.names import Phase
from piper.runtime.batch import StepInputs
from piper.runtime.comm.stream_shares import on_compute_stream
from piper.runtime.execute import Program
from piper.runtime.observe.measure import Measured, gathered, measure
from piper.runtime.processes.wire_format import travels

travels(Work)


def measured_costs(
    programs: Programs, program: Program, inputs: StepInputs, kind: BatchKind, rounds: int
) -> Costs:
    """The costs of a program, measured on all devices. Programs are compiled again with them."""
    with on_compute_stream(program.plan, program.device):
        seen = measure(program, inputs, rounds)
    codes, made = programs.assigned[kind].codes, programs.made.get(kind)
    models = [dag.model for dag, _ in made.dag.teams] if made else []
    costs = tuned(seen, codes, models, programs.job.machine.mode)
    programs.compile_again(costs)
    return costs


def tuned(
    measured: Measured, codes: Mapping[str, str], models: Sequence[Model], mode: Mode
) -> Costs:
    """The costs that all devices measured. At least one device has the model, for each size.

    Equal regions share their times. Regions are measured without CUDA graphs.
    """
    own: Works = {key: work for one in models for key, work in works_of(one).items()}
    everyone = gathered((measured, codes, own))
    works = {key: work for _, _, found in everyone for key, work in found.items()}
    seconds = medians(
        ((code[region], Phase(phase)), taken)
        for one, code, _ in everyone
        for (region, phase), times in one.compute.items()
        for taken in times
    )
    speeds = ((s, speed) for one, _, _ in everyone for s in one.streams for speed in one.streams[s])
    latency = [taken for one, _, _ in everyone for taken in one.latency]
    return Costs(
        figures=figures_of(works, seconds, mode.without_graphs),
        mode=mode,
        streams=medians(speeds),
        latency=statistics.median(latency) if latency else Costs().latency,
    )
