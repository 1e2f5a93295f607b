"""The axis that sends most should lie inside a node: Piper says so if another mesh does better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import chain, moe_chain

from piper.costs import Costs
from piper.costs.links import Link, Network
from piper.ir.by_device.roles import roles
from piper.ir.model import Bucket, Model, Parameter
from piper.ir.values import TensorSpec
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.pricing import mesh_notes, predict, price
from piper.plan.lower.role_plans import role_plans
from piper.strategies import BUILDERS
from piper.view.reports.mesh_advice import AxisTraffic

NODES = Network(2, inside=Link(1e6), between=Link(1e3))
ROW = 2 * 4 * 4  # bytes of what goes from region to region


def with_parameters(model: Model, size: int) -> Model:
    """Every bucket has so many bytes of parameters."""

    def bucket(one: Bucket) -> Bucket:
        return replace(one, parameters=(Parameter(f"{one.id}.w", TensorSpec((size // 4,))),))

    return replace(model, buckets={name: bucket(one) for name, one in model.buckets.items()})


def compiled(model: Model, by_role: bool = False, **options: Any) -> Compiled:
    strategy = BUILDERS["gpipe"](pp=2, microbatches=2, **options)
    return compile_strategy(model, strategy.directives, by_role=by_role)


def traffic(one: Compiled) -> AxisTraffic:
    found = roles(one.dag)
    plans = [plan for plan in one.plans if plan.device in found.first]
    job, few = role_plans(one.dag, plans, found)
    return AxisTraffic(job, list(few.values()))


@pytest.mark.parametrize("by_role", [False, True])
def test_bytes_between_nodes_are_the_closed_form(by_role: bool) -> None:
    """PP=2, DP=2: each replica sends two rows on and two gradients back, each device its ring."""
    heavy = with_parameters(chain(2), 256)
    ring = 2 * 256 * (2 - 1) // 2

    found = traffic(compiled(heavy, by_role, dp=2))

    assert found.sent == {"pp": 2 * 4 * ROW, "dp": 4 * ring}
    assert found.between(NODES.node) == {"pp": 0, "dp": 4 * ring}
    assert found.between(lambda device: device % 2) == {"pp": 2 * 4 * ROW, "dp": 0}


@pytest.mark.parametrize("by_role", [False, True])
def test_replicas_that_send_most_are_told_to_be_neighbours(by_role: bool) -> None:
    heavy = with_parameters(chain(2), 256)

    notes = mesh_notes(compiled(heavy, by_role, dp=2), NODES)

    assert notes == (
        "dp sends most (1.0 KiB in a step) and crosses nodes: "
        'mesh="pp,dp" sends 256 B between nodes in all instead of 1.0 KiB',
    )
    assert mesh_notes(compiled(heavy, by_role, dp=2, mesh="pp,dp"), NODES) == ()
    assert mesh_notes(compiled(heavy, by_role, dp=2), replace(NODES, per_node=4)) == ()


def test_stages_that_send_most_are_told_to_be_neighbours() -> None:
    light = with_parameters(chain(2), 8)

    assert mesh_notes(compiled(light, dp=2), NODES) == ()
    assert mesh_notes(compiled(light, dp=2, mesh="pp,dp"), NODES) == (
        "pp sends most (256 B in a step) and crosses nodes: "
        'mesh="dp,pp" sends 32 B between nodes in all instead of 256 B',
    )


def test_experts_that_send_most_are_told_to_be_neighbours() -> None:
    tokens = TensorSpec((600, 3))
    model = moe_chain(2, tokens=tokens)

    (note,) = mesh_notes(compiled(model, dp=4, ep=2), NODES)

    assert note.startswith("ep sends most (")
    assert 'mesh="pp,dp"' in note or 'mesh="dp,pp,ep"' in note
    assert mesh_notes(compiled(model, dp=4, ep=2, mesh="dp,pp,ep"), NODES) == ()


def test_the_simulator_shows_what_a_mesh_is_worth() -> None:
    """Rings of a KiB between nodes take a second for each 1000 bytes."""
    heavy = with_parameters(chain(2), 64_000)

    def step(**options: Any) -> tuple[float, tuple[str, ...]]:
        one = compiled(heavy, dp=2, **options)
        found = price(one, Costs(flops=1e30, memory=1e30), NODES)
        return found.seconds, predict(one, found, network=NODES).notes

    across, inside = step(), step(mesh="pp,dp")

    assert across[0] - inside[0] == pytest.approx(64, rel=0.01)
    assert 'mesh="pp,dp"' in across[1][-1]
    assert not any("mesh" in note for note in inside[1])
