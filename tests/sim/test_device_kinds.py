"""Several kinds of devices in one job: each is as fast as its kind, and the step is as slow."""

from __future__ import annotations

import pytest
from synthetic import chain

from piper.costs import Costs
from piper.costs.costs import Host
from piper.costs.device_lists import devices_by_name
from piper.costs.devices import device_kind, of_each_device
from piper.costs.links import NETWORKS
from piper.costs.measured import Figure, RegionKey
from piper.errors import StrategyError
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.pricing import JobCosts, predict, price
from piper.names import COMPUTE, B, F
from piper.sim.clock import Simulated
from piper.sim.report import report
from piper.strategies import gpipe
from piper.view.reports.simulation_text import memory


def kind(seconds: float, ahead: bool = True, each: float = 0.0) -> Costs:
    """A device that takes so long for a forward, and twice as long for a backward."""
    times = {F: seconds, B: 2 * seconds}
    figures = {RegionKey("block", phase): Figure(time) for phase, time in times.items()}
    return Costs(figures=figures, ahead=ahead, each=each)


def compiled(pp: int, microbatches: int, dp: int = 1, by_role: bool = False) -> Compiled:
    strategy = gpipe(pp=pp, microbatches=microbatches, dp=dp)
    return compile_strategy(chain(pp), strategy.directives, by_role=by_role)


def stepped(one: Compiled, costs: JobCosts) -> Simulated:
    return price(one, costs, NETWORKS["none"])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("times", [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_gpipe_on_two_kinds_is_the_closed_form(
    times: tuple[float, float], microbatches: int, ahead: bool
) -> None:
    """The slower stage works without a pause; the other adds one microbatch at each end."""
    found = stepped(compiled(2, microbatches), [kind(t, ahead) for t in times])

    assert found.seconds == pytest.approx(3 * (min(times) + microbatches * max(times)))


@pytest.mark.parametrize("by_role", [False, True])
def test_the_slowest_replica_sets_the_pace(by_role: bool) -> None:
    fast, slow = kind(1.0), kind(3.0)
    found = stepped(compiled(1, 2, dp=4, by_role=by_role), [fast, fast, slow, fast])

    assert found.seconds == pytest.approx(2 * 3 * 3.0)
    busy = [one.compute for one in report(found).devices]
    assert busy == pytest.approx([6.0, 6.0, 18.0, 6.0])


def test_devices_of_a_role_are_simulated_once_if_they_are_of_one_kind() -> None:
    fast, slow = kind(1.0), kind(3.0)
    by_role, in_full = compiled(2, 4, dp=2, by_role=True), compiled(2, 4, dp=2)

    stages, replicas = [fast, slow, fast, slow], [fast, fast, slow, slow]

    assert len(stepped(by_role, stages).plans) == 2
    assert len(stepped(by_role, replicas).plans) == 4
    for costs in (stages, replicas):
        assert stepped(by_role, costs).seconds == stepped(in_full, costs).seconds
    together = predict(by_role, stepped(by_role, stages), stages)
    assert sorted(together.alike.values()) == [(0, 2), (1, 3)]
    apart = predict(by_role, stepped(by_role, replicas), replicas)
    assert sorted(apart.alike.values()) == [(0,), (1,), (2,), (3,)]


def test_one_kind_in_a_list_is_as_one_kind() -> None:
    one, costs = compiled(2, 4, dp=2), kind(1.5)

    assert stepped(one, [costs] * 4).trace == stepped(one, costs).trace


def test_hosts_have_figures_of_their_own() -> None:
    """What has no price costs what the host of its device takes for an instruction."""
    one = compiled(1, 2, dp=2)

    found = stepped(one, [kind(1.0), kind(1.0, each=0.25)])

    work = [i for i in one.plans[1].instructions if i.stream == COMPUTE]
    first, second = (one.compute for one in report(found).devices)
    assert first == pytest.approx(6.0)
    assert second == pytest.approx(6.0 + 0.25 * (len(work) - 4))  # all but two F and two B


def test_data_sheets_of_two_kinds() -> None:
    kinds = of_each_device([*devices_by_name("a100:1,h200:0").items()], 2)

    assert kinds == ["h200", "a100"]
    rooms = {0: 10.0, 1: 1e9}
    one = compiled(2, 2)
    found = predict(one, stepped(one, kind(1.0)), memory=rooms)
    assert not found.fits
    assert found.fullest == 0
    assert "on device 0: does NOT fit in 10 B" in memory(found)
    assert predict(one, stepped(one, kind(1.0)), memory={0: 1e9, 1: 1e9}).fits
    assert device_kind("a100").memory < device_kind("h200").memory


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("h200,a100", "'h200,a100' does not say which devices it means"),
        ("h200:0-1,a100", "'h200:0-1,a100' does not say which devices it means"),
        ("h200:x", "'h200:x' does not say which devices it means"),
        ("h200:0-1,a100:1-2", "'h200:0-1,a100:1-2' lists device 1 twice"),
    ],
)
def test_a_list_that_says_too_little_or_too_much_is_refused(text: str, told: str) -> None:
    with pytest.raises(StrategyError, match=told):
        devices_by_name(text)


def test_every_device_needs_costs_and_hosts_of_one_kind() -> None:
    one = compiled(2, 2)

    with pytest.raises(StrategyError, match="the job has 3 devices, and device 1 is not listed"):
        of_each_device([("h200", (0,)), ("a100", (2,))], 3)
    with pytest.raises(StrategyError, match="costs for 1 device of 2 devices"):
        stepped(one, [kind(1.0)])
    with pytest.raises(StrategyError, match="some devices have hosts that wait"):
        stepped(one, [kind(1.0, ahead=True), kind(1.0, ahead=False)])
    assert kind(1.0, ahead=False).host == Host(blocks=True)
