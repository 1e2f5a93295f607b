"""One plan per role is compiled and sent; each device makes from it the plan of a full compilation.

The references are a full compilation, and lists of communicators and reported states that are read
off the plans of all devices one by one.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

import pytest
from divided import KINDS, divided_chain
from draws import every, one_of
from plan.expert_programs import random_experts
from plan.programs import random_program
from replicas import captured
from synthetic import chain, moe_chain

from piper.directives import Place, Replicate, Split
from piper.ir.filters import where
from piper.ir.model import Model
from piper.job.compile.assignment import (
    assigned,
    common_from_json,
    common_json,
    common_part,
    role_from_json,
    role_parts,
)
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.shipping import PlanShipping
from piper.names import TOTALS_STREAM, Device
from piper.plan.analyse.required_communicators import (
    RequiredCommunicators,
    required_communicators,
    role_meetings,
    state_turns,
)
from piper.plan.instructions import Exchange, Plan, Send, Total
from piper.plan.instructions.communicator import Channel, Group
from piper.plan.serialization import to_json
from piper.strategies import BUILDERS

V_SHAPED = ("zbv", "dualpipev", "interleaved-1f1b", "interleaved-zb")  # two stages on a device


def both(model: Model, directives: Any, clip: bool = True) -> tuple[Compiled, Compiled]:
    """Compiled by role, and in full."""
    few, full = (
        compile_strategy(model, directives, clip=clip, by_role=by_role) for by_role in (True, False)
    )
    return few, full


def assert_same(few: Compiled, full: Compiled) -> None:
    """Plans to the byte, communicators in the same order, the same states reported, everywhere."""
    assert list(map(to_json, few.device_plans)) == list(map(to_json, full.plans))
    groups, roles = few.by_role
    met, reported = role_meetings(list(roles.values())), dict(reporting(full.plans))
    common = communicators(full.plans)
    for plan in few.device_plans:
        found = required_communicators(met, groups, plan)
        assert (found.streams, found.teams, found.links) == common
        assert list(found.token_groups) == sorted(set(exchanging(plan)))
        assert_one_order(full.plans, found.totals)
        turns = state_turns(met, groups, plan)
        assert [name for name, (k, _) in turns.items() if k == 0] == reported[plan.device]


def assert_one_order(plans: tuple[Plan, ...], totals: Any) -> None:
    """If the loss is added up in another communicator, its messages have one order everywhere."""
    orders = [
        tuple(
            one.node
            for one in plan.instructions
            if isinstance(one, Total) or one.communicator(plan.device) == totals
        )
        for plan in plans
    ]
    assert totals is None or (len(set(orders)) == 1 and len(orders[0]) > 1)


@one_of(2)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ep", [1, 2])
def test_the_loss_is_added_up_where_the_replicas_meet(zero: int, ep: int) -> None:
    """Not with several stages, and not where tokens are exchanged, which a thread does."""
    found = []
    for pp in (1, 2):
        few, _ = built("gpipe", pp, 2, ep, zero)
        groups, roles = few.by_role
        met = role_meetings(list(roles.values()))
        found += [required_communicators(met, groups, plan) for plan in few.device_plans]

    assert {one.totals for one in found[2:]} == {None}
    assert len({one.totals for one in found[:2]}) == 1
    for one in found[:2]:
        assert one.totals in one.teams and one.totals not in one.token_groups


def communicators(plans: tuple[Plan, ...]) -> tuple[Any, Any, Any]:
    every = {one.communicator(plan.device) for plan in plans for one in plan.instructions}
    channels = sorted(one for one in every if isinstance(one, Channel))
    teams = sorted(one for one in every if isinstance(one, Group) and one.stream != TOTALS_STREAM)
    return tuple(sorted({one.stream for one in channels})), tuple(teams), tuple(channels)


def exchanging(plan: Plan) -> Iterator[tuple[str, tuple[Device, ...]]]:
    return ((o.stream, o.group) for o in plan.instructions if isinstance(o, Exchange))


def reporting(plans: tuple[Plan, ...]) -> Iterator[tuple[Device, list[str]]]:
    seen: set[tuple[str, int, int]] = set()
    for plan in plans:
        keys = {s.value: (s.bucket, s.share, s.shard) for s in plan.states if s.home}
        yield plan.device, [value for value, key in keys.items() if key not in seen]
        seen.update(keys.values())


def built(name: str, pp: int, dp: int, ep: int, zero: int) -> tuple[Compiled, Compiled]:
    stages = 2 * pp if name in V_SHAPED else pp
    strategy = BUILDERS[name](pp=pp, microbatches=2 * pp, dp=dp, ep=ep, zero=zero)
    return both(moe_chain(stages) if ep > 1 else chain(stages, tied=pp > 1), strategy.directives)


@one_of(2)
@pytest.mark.parametrize("name", every(2, BUILDERS))
def test_a_device_makes_the_plan_of_a_full_compilation(name: str) -> None:
    """Two of four levels of each schedule, such that neighbours have the others."""
    sizes = list(enumerate([(2, 1), (4, 2), (4, 4), (3, 1)]))
    for zero, (dp, ep) in sizes[list(BUILDERS).index(name) % 2 :: 2]:
        few, full = built(name, 2, dp, ep, zero)

        assert len(few.plans) == 2
        assert_same(few, full)


def sizes(name: str) -> tuple[int, ...]:
    """DualPipe mirrors an even number of stages."""
    return (2, 4) if name == "dualpipe" else (1, 2, 4)


@pytest.mark.soak
@pytest.mark.parametrize("name", BUILDERS)
def test_of_every_size(name: str) -> None:
    for zero, (dp, ep), pp in product(range(4), [(3, 1), (4, 1), (4, 2), (8, 4)], sizes(name)):
        few, full = built(name, pp, dp, ep, zero)

        assert len(few.plans) == pp
        assert_same(few, full)


def random_pair(seed: int) -> tuple[Compiled, Compiled]:
    random = Random(seed)
    if seed % 3 == 0:
        program = random_experts(random, 2, 2, 4)
    else:
        copies = random.choice([2, 3, 4])
        program = random_program(random, random.randint(1, 4), random.randint(1, 3), copies=copies)
    return both(program.model, program.directives, program.clip)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 800), marks=pytest.mark.soak)])
def test_so_does_a_device_of_any_strategy(seeds: range) -> None:
    by_role = 0
    for seed in seeds:
        few, full = random_pair(seed)
        assert_same(few, full)
        by_role += len(few.plans) < len(full.plans)

    assert by_role > len(seeds) * 0.7


def test_replicas_that_differ_are_compiled_in_full_and_it_says_why() -> None:
    crossed = [
        Place(where(PP=0), [0, 1, 2, 3]),
        Place(where(PP=1), [4, 5, 6, 7]),
        Replicate(where(PP=0), [[0, 1], [2, 3]], zero=1),
        Replicate(where(PP=1), [[4, 5], [6, 7]], zero=1),
        Split("MB", 2),
    ]
    few, full = both(chain(2), crossed)
    assert len(few.plans) == 2
    assert_same(few, full)

    folded = [
        Place(where(PP=0), [0, 1]),
        Place(where(PP=1), [2, 3]),
        Place(where(PP=2), [0, 4]),  # in the second replica, on a device of its own
        *(Replicate(where(PP=k), d) for k, d in enumerate([[0, 1], [2, 3], [0, 4]])),
    ]
    few, full = both(chain(3), folded)
    assert len(few.plans) == 5
    assert few.roles.obstacle == "its replicas do not have the same regions on their devices"
    assert_same(few, full)


def test_device_0_may_have_a_role_that_another_device_stands_for() -> None:
    turned = [
        Place(where(PP=0), [2, 0]),
        Place(where(PP=1), [1, 3]),
        Replicate(where(PP=0), [2, 0], zero=2),
        Replicate(where(PP=1), [1, 3], zero=2),
        Split("MB", 2),
    ]

    few, full = both(chain(2), turned)

    assert few.roles.first == (1, 2)
    assert_same(few, full)


@pytest.mark.parametrize(
    ("name", "pp", "microbatches"),
    [("1f1b", 4, 8), pytest.param("dualpipev", 16, 64, marks=pytest.mark.soak)],
)
def test_parcels_of_4096_devices(name: str, pp: int, microbatches: int) -> None:
    """Compiled, checked, made, sent as text and unpacked, in under 30 s and 4 GiB."""
    _, _, found = captured("moe spread", 2 * pp if name in V_SHAPED else pp, 1)
    strategy = BUILDERS[name](pp=pp, microbatches=microbatches, dp=4096 // pp, ep=4, zero=1)

    started = time.process_time()
    compiled = compile_strategy(found.model, strategy.directives, clip=True, by_role=True)
    parts, roles = role_parts(found, compiled), compiled.roles
    parcels = PlanShipping(fused=False).parcels(roles, parts, found.kernels)
    text = common_json(common_part(found, compiled))
    common = common_from_json(text)
    mine = {
        device: assigned(common, role_from_json(json.loads(parcels[roles.of[device]])[0]), device)
        for device in (0, 1, 2050, 4095)
    }

    assert time.process_time() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20
    assert len(parcels) == pp
    assert len(text) < 2**18 and max(map(len, parcels.values())) < 2**22
    for device, one in mine.items():
        assert one.plan.device == device
        assert one.plan == compiled.plan(device)
        assert_links_are_own(one.needs, one.plan, pp)
    assert mine[4095].needs.teams == mine[0].needs.teams


def assert_links_are_own(needs: RequiredCommunicators, plan: Plan, pp: int) -> None:
    """Every peer is in the same replica, `pp` devices wide."""
    sends = [one for one in plan.instructions if isinstance(one, Send)]
    assert sends
    for one in sends:
        assert one.peer // pp == plan.device // pp
        assert (one.stream, plan.device, one.peer) in needs.links


def divided(name: str, pp: int, dp: int, ways: int, zero: int, kind: str) -> Any:
    """A model whose weights or tokens are divided, under a builder."""
    stages = 2 * pp if name in V_SHAPED else pp
    how = {"cp" if kind == "cp" else "tp": ways}
    strategy = BUILDERS[name](pp=pp, microbatches=2 * pp, dp=dp, zero=zero, **how)
    return both(divided_chain(stages, ways, KINDS[kind]), strategy.directives)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak if k % 8 else ())
        for k, name in enumerate(BUILDERS)
    ],
)
def test_each_part_of_a_divided_stage_is_a_role(name: str) -> None:
    for zero, (dp, ways, kind) in enumerate(
        [(2, 2, "tp"), (3, 2, "sp"), (2, 4, "cp"), (4, 2, "others")]
    ):
        few, full = divided(name, 2, dp, ways, zero, kind)

        assert (len(few.plans), len(full.plans)) == (2 * ways, 2 * dp * ways)
        assert_same(few, full)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUILDERS)
def test_divided_stages_of_every_size(name: str, kind: str) -> None:
    for zero, dp, ways, pp in product(range(4), (2, 3, 8), (2, 4), sizes(name)[:-1]):
        assert_same(*divided(name, pp, dp, ways, zero, kind))


def test_a_job_of_many_replicas_costs_what_its_roles_cost() -> None:
    strategy = BUILDERS["1f1b"](pp=2, microbatches=4, dp=256, tp=2, zero=1)

    compiled = compile_strategy(divided_chain(2), strategy.directives, by_role=True)

    assert (len(compiled.roles.of), len(compiled.plans)) == (1024, 4)
