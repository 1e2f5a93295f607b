"""A DeepSeek-V3-like job of thousands of devices: compile, check, simulate, without a device.

    python bench/scale.py [--devices 2048 16384] [--microbatches 32 64 128] [--profile]

Goal: 61 layers, PP=16, EP=64, DualPipeV, 128 microbatches in under 30 s and 8 GiB on two cores,
linear in microbatches, and no more for 16,384 devices than for 2,048.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import time
from dataclasses import dataclass

from common import save
from large_models import DeepSeekLike

from piper.costs.devices import costs_of_device, device_kind
from piper.costs.links import NETWORKS
from piper.garbage import collector_off
from piper.job.compile.compiler import compile_strategy
from piper.job.compile.pricing import price
from piper.plan.analyse.memory import peak
from piper.sim.report import report
from piper.strategies import dualpipev

PP, EP = 16, 64


@dataclass(frozen=True)
class Took:
    """Seconds of each part, and the results."""

    devices: int
    microbatches: int
    nodes: int
    instructions: int
    compile: float  # with all checks
    simulate: float  # with its report, and the memory of all roles
    gib: float
    step: float

    @property
    def seconds(self) -> float:
        return self.compile + self.simulate


def job(devices: int, microbatches: int) -> Took:
    model, network = DeepSeekLike(2 * PP).model(), NETWORKS["h800"]
    started = time.perf_counter()
    strategy = dualpipev(
        pp=PP, microbatches=microbatches, dp=devices // PP,
        ep=min(EP, devices // PP), zero=1,
        expert_stages=range(1, 2 * PP),
    )  # fmt: skip
    compiled = compile_strategy(model, strategy.directives, by_role=True)
    made = time.perf_counter()
    with collector_off():
        step = price(compiled, costs_of_device(device_kind("h800"), model, network), network)
        found = report(step)
        for plan in compiled.plans:
            peak(compiled.dag, plan)
    priced = time.perf_counter()
    return Took(
        devices, microbatches, len(compiled.dag.nodes),
        sum(len(plan.instructions) for plan in compiled.plans), made - started, priced - made,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, found.seconds,
    )  # fmt: skip


def show(took: Took, before: Took | None) -> None:
    growth = "-"
    if before:
        growth = f"{took.seconds / before.seconds / (took.nodes / before.nodes):.2f}"
    print(
        f"{took.devices:6} devices {took.microbatches:4} microbatches {took.nodes:7} nodes "
        f"{took.instructions:7} instructions  compile and check {took.compile:5.1f} s, simulate "
        f"{took.simulate:5.1f} s, together {took.seconds:5.1f} s, {took.gib:.2f} GiB; "
        f"growth against linear {growth}; step {took.step:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--profile", action="store_true", help="also print the hottest functions")
    chosen = parser.parse_args()
    results = []
    for devices in chosen.devices:
        before = None
        for microbatches in chosen.microbatches:
            took = job(devices, microbatches)
            show(took, before)
            results.append(took.__dict__ | {"seconds": took.seconds})
            before = took
    if chosen.profile:
        hottest(chosen.devices[0], chosen.microbatches[-1])
    save("scale", results)


def hottest(devices: int, microbatches: int) -> None:
    watch = cProfile.Profile()
    watch.runcall(job, devices, microbatches)
    pstats.Stats(watch).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
