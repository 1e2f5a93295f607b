"""Messages on links: latency, bandwidth, and what they share, against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from piper.costs.costs import Host
from piper.costs.links import NETWORKS, Link, Network
from piper.errors import StrategyError
from piper.plan.instructions import (
    Exchange,
    Gather,
    Instruction,
    Plan,
    Recv,
    Reduce,
    Run,
    Send,
    Shape,
)
from piper.sim.clock import simulate

PLAIN = Network(2, inside=Link(100.0, 0.5), between=Link(10.0, 2.0))  # devices 0, 1 | 2, 3 | ...
Way = tuple[int, int, int]  # from, to, bytes


def shapes(size: int) -> tuple[Shape, ...]:
    return (((size,), "int8"),)


def times(
    network: Network, *ways: Way, late: dict[int, float] | None = None, stream: str = "pp"
) -> list[float]:
    """When each message has come; `late`: its sender computes for so long first."""
    plans: dict[int, list[Instruction]] = {}
    ends = []
    for k, (source, target, size) in enumerate(ways):
        mine, other = plans.setdefault(source, []), plans.setdefault(target, [])
        waits = ()
        if late and k in late:
            mine.append(Run(f"wait {k}", f"r{k}", "F", (), ()))
            waits = (len(mine) - 1,)
        mine.append(Send(f"s{k}", f"v{k}", shapes(size), target, stream, waits))
        other.append(Recv(f"s{k}", f"v{k}", shapes(size), source, stream))
        ends.append((target, len(other) - 1))
    return done(network, plans, ends, lambda one: late_of(one, late or {}))


def late_of(one: Instruction, late: dict[int, float]) -> float:
    return late[int(one.region[1:])] if isinstance(one, Run) else 0.0


def done(
    network: Network,
    plans: dict[int, list[Instruction]],
    ends: list[tuple[int, int]],
    price: Callable[[Instruction], float] = lambda one: 0.0,
    host: Host | None = None,
) -> list[float]:
    all_plans = [Plan(device, (), tuple(ones)) for device, ones in sorted(plans.items())]
    found = simulate(all_plans, price, network, host)
    return [found.trace.spans[device][at].end for device, at in ends]


def test_a_message_takes_latency_and_bytes_over_bandwidth() -> None:
    assert times(PLAIN, (0, 1, 200)) == [0.5 + 2.0]
    assert times(PLAIN, (0, 2, 200)) == [2.0 + 20.0]


def test_uplink_and_spine_add_their_latencies() -> None:
    there = replace(PLAIN, uplink=Link(1e3, 0.25), spine=Link(1e3, 0.125))

    assert times(there, (0, 1, 100), (2, 4, 100)) == [0.5 + 1.0, 2.375 + 10.0]


def test_two_messages_of_one_device_share_its_way_out() -> None:
    near = Network(4, inside=Link(100.0))

    assert times(near, (0, 1, 100), (0, 2, 100)) == pytest.approx([2.0, 2.0])
    assert times(near, (0, 2, 100), (1, 2, 100)) == pytest.approx([2.0, 2.0])  # and its way in
    assert times(near, (0, 1, 100), (2, 3, 100)) == pytest.approx([1.0, 1.0])


def test_both_directions_of_a_link_have_all_of_it() -> None:
    assert times(Network(2, inside=Link(100.0)), (0, 1, 100), (1, 0, 100)) == [1.0, 1.0]


def test_a_third_message_that_starts_later() -> None:
    """Two at 50 for a second, three at 33.3 for 1.5 s, then the third has 50 bytes left."""
    near = Network(4, inside=Link(100.0))

    found = times(near, (0, 1, 100), (0, 2, 100), (0, 3, 100), late={2: 1.0})

    assert found == pytest.approx([2.5, 2.5, 3.0])


def test_messages_of_one_channel_go_one_after_the_other() -> None:
    assert times(PLAIN, (0, 1, 100), (0, 1, 100)) == [1.5, 3.0]


def test_devices_of_a_node_share_its_uplink() -> None:
    free = replace(PLAIN, between=Link(10.0))
    shared = replace(free, uplink=Link(10.0))
    ways = (0, 2, 100), (1, 3, 100)

    assert times(free, *ways) == pytest.approx([10.0, 10.0])
    assert times(shared, *ways) == pytest.approx([20.0, 20.0])
    assert times(shared, (0, 2, 100), (3, 1, 100)) == pytest.approx([10.0, 10.0])  # out and in
    assert times(shared, (0, 2, 100), (4, 3, 100)) == pytest.approx([20.0, 20.0])  # both into one


def test_all_nodes_share_the_spine() -> None:
    there = replace(PLAIN, between=Link(10.0), spine=Link(10.0))

    assert times(there, (0, 2, 100), (4, 6, 100)) == pytest.approx([20.0, 20.0])
    assert times(there, (0, 2, 100), (4, 5, 100)) == pytest.approx([10.0, 1.5])  # not inside


def test_a_pair_has_its_link_for_itself() -> None:
    """One slow pair among fast ones, in one direction only."""
    there = Network(4, inside=Link(100.0), pairs={(0, 1): Link(10.0, 1.0)})

    found = times(there, (0, 1, 100), (0, 2, 100), (1, 0, 100))

    assert found == pytest.approx([11.0, 1.0, 1.0])


def test_a_stream_may_have_a_limit_of_its_own() -> None:
    there = Network(4, inside=Link(100.0), streams={"ep": 20.0})

    assert times(there, (0, 1, 100), stream="ep") == [5.0]
    assert times(there, (0, 1, 100), stream="pp") == [1.0]


GROUP = (0, 1, 2, 3)  # two nodes of two devices
SIZE = 400


def collective(kind: str) -> Instruction:
    layout = (("int8", (0,), SIZE),)
    match kind:
        case "all-reduce":
            return Reduce("c", "g", "G", layout, GROUP, False, "dp")
        case "reduce-scatter":
            return Reduce("c", "g", "G", layout, GROUP, True, "dp")
        case "gather":
            return Gather("c", "w", "W", layout, shapes(SIZE), GROUP, 0, "dp")
        case _:
            return Exchange("c", kind, ("x",), ("y",), shapes(SIZE), GROUP, "dp")


@pytest.mark.parametrize(
    ("kind", "inside", "outside", "latencies"),
    [
        # rings: (n-1)/n of the bytes inside, once or twice; 1/2 of them between two nodes, divided
        # over the two ways out; log2(4) rounds
        ("all-reduce", 600, 200, 4),
        ("reduce-scatter", 300, 100, 2),
        ("gather", 300, 100, 2),
        # rows go straight to everyone: a quarter stays, one goes inside, two go out
        ("out", 100, 200, 1),
        ("counted", 100, 200, 2),  # the counts go first
    ],
)
def test_collectives_on_two_nodes_of_two(
    kind: str, inside: int, outside: int, latencies: int
) -> None:
    plans = {device: [collective(kind)] for device in GROUP}

    slow_out = done(Network(2, Link(1e6), Link(10.0, 3.0)), plans, [(0, 0)])
    slow_in = done(Network(2, Link(10.0), Link(1e6, 3.0)), plans, [(3, 0)])
    shared = done(Network(2, Link(1e6), Link(10.0), Link(10.0)), plans, [(1, 0)])

    assert slow_out == pytest.approx([3.0 * latencies + outside / 10])
    assert slow_in == pytest.approx([3.0 * latencies + inside / 10])
    assert shared == pytest.approx([2 * outside / 10])  # of both devices of a node


def test_in_one_node_only_its_links_count() -> None:
    plans = {device: [collective("all-reduce")] for device in GROUP}

    assert done(Network(4, Link(10.0, 1.0), Link(1e-9)), plans, [(0, 0)]) == [4 + 60.0]


def test_messages_cost_the_cores_of_both_ends() -> None:
    """A byte costs 0.01 s of a core: the only core of the node does both ends of 100 bytes."""
    plans: dict[int, list[Instruction]] = {
        0: [Send("s", "v", shapes(100), 1, "pp")], 1: [Recv("s", "v", shapes(100), 0, "pp")],
    }  # fmt: skip
    host = Host(blocks=True, cores=1.0, wire=0.01)

    assert done(Network(2, Link(1e9)), plans, [(1, 0)], host=host) == pytest.approx([2.0])


def test_devices_share_cores_while_they_compute() -> None:
    plans: dict[int, list[Instruction]] = {
        device: [Run("r", "r0", "F", (), ())] for device in range(4)
    }
    host = Host(blocks=True, cores=2.0)
    ends = [(device, 0) for device in range(4)]

    assert done(Network(4), plans, ends, lambda one: 1.0, host) == pytest.approx([2.0] * 4)
    assert done(Network(2), plans, ends, lambda one: 1.0, host) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("text", ["{", "[]", '{"inside": {"speed": 1}}', '{"pairs": [[1]]}'])
def test_a_file_that_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="this is no network"):
        Network.from_json(text)


@pytest.mark.parametrize("text", ['{"per_node": 0}', '{"inside": {"bandwidth": -1}}'])
def test_figures_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="fix: "):
        Network.from_json(text)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "none"])
def test_known_networks_are_faster_inside_a_node(name: str) -> None:
    there = NETWORKS[name]

    assert times(there, (0, 1, 10**9)) < times(there, (0, 8, 10**9))
    assert Network.from_json(there.to_json()) == there
