"""What a step on the clock tells adds up, and its critical path leaves nothing out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from draws import one_of
from synthetic import chain, moe_chain

from piper.costs import Costs
from piper.costs.links import Link, Network
from piper.ir.model import Model
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.pricing import predict, price
from piper.names import BI, BW, B, F
from piper.plan.instructions import Instruction, Plan, Recv, Reduce, Run, Send, Update
from piper.sim.clock import Simulated, simulate
from piper.sim.report import HOST, Report, report
from piper.strategies import BUILDERS

GPU = Costs(ahead=True, link=500.0, latency=0.05, add=0.001, update=0.002, square=0.001)
CPU = replace(GPU, ahead=False, post=0.01, each=0.002, cores=3.0, wire=0.0005)
SLOW = Network(2, Link(500.0, 0.02), Link(100.0, 0.1), uplink=Link(120.0))
STAGES = {"interleaved-1f1b": 2, "zbv": 2, "dualpipev": 2}
STRATEGIES = [
    ("gpipe", {}), ("1f1b", {"dp": 2}), ("interleaved-1f1b", {"dp": 2, "zero": 1}),
    ("zb-h1", {"dp": 2, "zero": 2}), ("zbv", {"dp": 2, "zero": 3}),
    ("dualpipev", {"dp": 2, "ep": 2, "zero": 2}),
]  # fmt: skip


def uneven(model: Model) -> Model:
    """Regions that take different times: 0.5, 0.8, 1.1 ... of a second forward."""
    regions = tuple(
        replace(
            one,
            flops={F: (5 + 3 * k) * 2e9, B: (9 + 7 * k) * 2e9, BI: 5e9 * k, BW: 4e9 + 9e9 * k},
        )
        for k, one in enumerate(model.regions)
    )
    return replace(model, regions=regions)


@cache
def compiled(name: str, options: tuple[tuple[str, int], ...]) -> Compiled:
    given = dict(options)
    stages = 2 * STAGES.get(name, 1)
    model = moe_chain(stages) if "ep" in given else chain(stages, tied=True)
    strategy = BUILDERS[name](pp=2, microbatches=6, **given)
    return compile_strategy(uneven(model), strategy.directives, clip=True)


def on_the_clock(name: str, options: dict[str, int], costs: Costs) -> Simulated:
    return price(compiled(name, tuple(options.items())), costs, SLOW)


@one_of(3)
@pytest.mark.parametrize("costs", [GPU, CPU], ids=["ahead", "blocks"])
@pytest.mark.parametrize(("name", "options"), STRATEGIES)
def test_compute_waiting_and_bubble_are_the_step(
    name: str, options: dict[str, int], costs: Costs
) -> None:
    found = report(on_the_clock(name, options, costs))

    for one in found.devices:
        parts = [one.compute, *one.exposed.values(), one.bubble]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(found.seconds)


@pytest.mark.parametrize("costs", [GPU, CPU], ids=["ahead", "blocks"])
@pytest.mark.parametrize(("name", "options"), STRATEGIES)
def test_the_critical_path_leads_without_a_gap_from_the_end_to_the_start(
    name: str, options: dict[str, int], costs: Costs
) -> None:
    found = report(on_the_clock(name, options, costs))

    assert found.critical[0].end == found.seconds
    for later, earlier in zip(found.critical, found.critical[1:], strict=False):
        assert earlier.end == pytest.approx(later.start, abs=1e-12)
    assert found.critical[-1].start == 0.0
    assert sum(found.bounds.values()) == pytest.approx(found.seconds)


@pytest.mark.parametrize(("name", "options"), STRATEGIES)
def test_a_host_that_runs_ahead_is_never_what_is_waited_for(
    name: str, options: dict[str, int]
) -> None:
    found = report(on_the_clock(name, options, GPU))

    assert HOST not in {what for _, _, what in found.bounds}


def step(plans: list[list[Instruction]], prices: dict[str, float], network: Network) -> Report:
    """`prices`: seconds of a region, or of updates."""

    def cost(one: Instruction) -> float:
        if isinstance(one, Update):
            return prices.get("update", 0.0)
        return prices[one.region] if isinstance(one, Run) else 0.0

    made = [Plan(device, (), tuple(ones)) for device, ones in enumerate(plans)]
    return report(simulate(made, cost, network))


def run(name: str, *waits: int) -> Run:
    return Run(name, name, "F", (), (), waits)


def test_what_is_waited_for_by_hand() -> None:
    """Device 0 computes 3 s and sends 40 bytes at 10 a second; device 1 computes 1 s, waits for 2 s
    of compute and then 4 s of message, and computes 2 s."""
    size = (((40,), "int8"),)
    plans: list[list[Instruction]] = [
        [run("a"), Send("m", "v", size, 1, "pp", (0,))],
        [Recv("m", "v", size, 0, "pp"), run("b"), run("c", 0)],
    ]

    found = step(plans, {"a": 3.0, "b": 1.0, "c": 2.0}, Network(2, Link(10.0)))

    assert found.seconds == 9.0
    first, second = found.devices
    assert (first.compute, dict(first.exposed), first.bubble) == (3.0, {}, 6.0)
    assert (second.compute, dict(second.exposed), second.bubble) == (3.0, {"pp": 4.0}, 2.0)
    assert found.exposed == {"pp": 2.0}
    assert found.messages == {"pp": 8.0}  # seen from both ends
    assert found.uncovered == {"pp": 0.5}
    assert found.bounds == {(None, "", "pp"): 4.0, (0, "a", "F"): 3.0, (1, "c", "F"): 2.0}


def test_a_message_that_ends_the_step_is_waited_for() -> None:
    """Device 1 computes 1 s. What it receives then takes from 3 s to 7 s."""
    size = (((40,), "int8"),)
    plans: list[list[Instruction]] = [
        [run("a"), Send("m", "v", size, 1, "pp", (0,))],
        [run("b"), Recv("m", "v", size, 0, "pp", (0,))],
    ]

    found = step(plans, {"a": 3.0, "b": 1.0}, Network(2, Link(10.0)))

    first, second = found.devices
    assert (first.compute, dict(first.exposed), first.bubble) == (3.0, {}, 4.0)
    assert (second.compute, dict(second.exposed), second.bubble) == (1.0, {"pp": 4.0}, 2.0)


def test_what_hides_behind_compute_is_not_waited_for() -> None:
    size = (((40,), "int8"),)
    plans: list[list[Instruction]] = [
        [run("a"), Send("m", "v", size, 1, "pp", (0,))],
        [Recv("m", "v", size, 0, "pp"), run("b"), run("c", 0)],
    ]

    found = step(plans, {"a": 1.0, "b": 4.0, "c": 2.0}, Network(2, Link(10.0)))

    assert found.seconds == 7.0
    assert dict(found.devices[1].exposed) == {"pp": 1.0}  # the last of its four seconds


def test_reductions_one_after_the_other_are_all_waited_for() -> None:
    """Two of 2 s each on one stream after 1 s of compute; the first update waits for both."""
    layout = (("int8", (0,), 20),)
    ones: list[Instruction] = [
        run("a"),
        Reduce("r0", "g0", "G0", layout, (0, 1), False, "dp", (0,)),
        Reduce("r1", "g1", "G1", layout, (0, 1), False, "dp", (0,)),
        Update("u", "b", "G1", waits=(2,)),
    ]

    found = step([ones, ones], {"a": 1.0, "update": 0.5}, Network(2, Link(10.0)))

    assert found.seconds == 5.5
    assert [dict(one.exposed) for one in found.devices] == [{"dp": 4.0}] * 2
    assert found.uncovered == {"dp": 1.0}
    assert found.bubble == 0.0


def test_an_estimate_knows_samples_and_what_fits() -> None:
    one = compiled("1f1b", (("dp", 2),))
    found = price(one, GPU, SLOW)

    small = predict(one, found, memory=10.0)
    large = predict(one, found, memory=1e12)

    assert small.samples == 2 * 6 * 2  # replicas, microbatches, rows of each
    assert small.tokens is None and small.unit == "samples"  # its inputs are no token ids
    assert small.rate == pytest.approx(24 / found.seconds)
    assert not small.fits
    assert large.fits
    assert small.peak == max(peak.total for peak in small.peaks.values())
    assert predict(one, found, optimizer=0.0).peak < small.peak
