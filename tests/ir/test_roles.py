"""One device of each role tells what all do; where replicas differ, nobody stands for another."""

from __future__ import annotations

from typing import Any

import pytest
from draws import one_of
from synthetic import chain, moe_chain

from piper.directives import Place, Replicate, Split
from piper.errors import PlanError
from piper.ir.by_device.roles import Present, roles
from piper.ir.filters import where
from piper.ir.model import Model
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.check.check import check
from piper.plan.check.proof import prove
from piper.plan.instructions import Exchange, Gather, Reduce, Run
from piper.strategies import BUILDERS

CASES: list[tuple[str, Model, dict[str, Any]]] = [
    ("1f1b", chain(2), {"dp": 4}),
    ("1f1b", chain(2), {"dp": 4, "zero": 1}),
    ("zb-h1", chain(2), {"dp": 3, "zero": 3}),
    ("zbv", chain(4), {"dp": 4, "zero": 2}),
    ("dualpipe", chain(2), {"dp": 3}),
    ("dualpipe", chain(2), {"dp": 2, "zero": 2}),
    ("dualpipev", moe_chain(4), {"dp": 4, "ep": 2, "zero": 1}),
    ("dualpipev", moe_chain(4), {"dp": 4, "ep": 4, "zero": 3}),
    ("1f1b", moe_chain(2), {"dp": 8, "ep": 4}),
]


def compiled(name: str, model: Model, options: dict[str, Any], by_role: bool) -> Compiled:
    strategy = BUILDERS[name](pp=2, microbatches=4, **options)
    return compile_strategy(model, strategy.directives, by_role=by_role, clip=True)


@one_of(3)
@pytest.mark.parametrize(("name", "model", "options"), CASES)
def test_a_role_has_the_plan_of_its_device(
    name: str, model: Model, options: dict[str, Any]
) -> None:
    some, all_of_them = (compiled(name, model, options, by_role) for by_role in (True, False))

    assert len(some.plans) == 2
    assert [all_of_them.plan(plan.device) for plan in some.plans] == list(some.plans)
    assert some.plan(all_of_them.plans[-1].device) == all_of_them.plans[-1]


@one_of(2)
@pytest.mark.parametrize(("name", "model", "options"), CASES)
def test_all_devices_of_a_role_do_the_same(
    name: str, model: Model, options: dict[str, Any]
) -> None:
    found = compiled(name, model, options, by_role=False)
    of = roles(found.dag).of

    for plan in found.plans:
        first = found.plan(of[plan.device])
        for mine, other in zip(plan.instructions, first.instructions, strict=True):
            assert (type(mine), mine.waits, mine.stream) == (
                type(other), other.waits, other.stream,
            )  # fmt: skip
            assert getattr(mine, "node", None) == getattr(other, "node", None)
            if hasattr(mine, "peer"):
                assert of[mine.peer] == of[other.peer]  # type: ignore[union-attr]
            if isinstance(mine, Reduce | Gather | Exchange):
                assert sorted(of[d] for d in mine.group) == sorted(of[d] for d in other.group)  # type: ignore[union-attr]


@pytest.mark.parametrize("zero", [0, 3])
def test_unequal_replicas_have_roles(zero: int) -> None:
    """Of four groups of three devices, one tells what all do."""
    many, few = [0, 2, 3, 5, 6, 8, 9, 11], [1, 4, 7, 10]
    strategy = [
        Place(where(PP=0), many), Place(where(PP=1), few), Split("MB", 2),
        Replicate(where(PP=0), many, zero=zero), Replicate(where(PP=1), few, zero=zero),
    ]  # fmt: skip
    model = chain(2, tied=True)

    some, whole = (compile_strategy(model, strategy, by_role=by_role) for by_role in (True, False))

    assert [plan.device for plan in some.plans] == [0, 1, 2]
    assert [whole.plan(plan.device) for plan in some.plans] == list(some.plans)
    assert some.plan(11) == whole.plan(11)
    for device in range(12):
        mine, first = whole.plan(device).instructions, whole.plan(device % 3).instructions
        assert [one.node for one in mine] == [one.node for one in first]
        runs = [[one.uses for one in code if isinstance(one, Run)] for code in (mine, first)]
        assert runs[0] == runs[1]


def test_replicas_that_differ_have_roles_of_their_own() -> None:
    uneven = [
        Place(where(PP=0), [0, 1, 2, 3]),
        Place(where(PP=1), [5, 4, 7, 6]),
        Replicate(where(PP=0), [[0, 1], [2, 3]], zero=1),
        Replicate(where(PP=1), [[5, 6], [4, 7]], zero=1),
        Split("MB", 2),
    ]

    assert len(compile_strategy(chain(2), uneven, by_role=True).plans) == 2

    apart = [
        Place(where(PP=0), [0, 1]),
        Place(where(PP=1), [1, 0]),
        Place(where(PP=2), [2, 3]),
        *(Replicate(where(PP=k), d) for k, d in enumerate([[0, 1], [1, 0], [2, 3]])),
    ]

    assert len(compile_strategy(chain(3), apart, by_role=True).plans) == 4

    folded = [
        Place(where(PP=0), [0, 1]),
        Place(where(PP=1), [2, 3]),
        Place(where(PP=2), [0, 4]),  # in the second replica, on a device of its own
        *(Replicate(where(PP=k), d) for k, d in enumerate([[0, 1], [2, 3], [0, 4]])),
    ]

    assert len(compile_strategy(chain(3), folded, by_role=True).plans) == 5


def test_a_plan_that_is_missing_or_wrong_is_still_found() -> None:
    found = compiled("dualpipev", moe_chain(4), {"dp": 4, "ep": 2, "zero": 1}, by_role=True)
    firsts = found.roles.first

    check(found.dag, found.plans, firsts)
    told = str(prove(found.dag, found.plans, firsts))
    assert told.startswith("ok: 8 devices in 2 roles, ")
    with pytest.raises(PlanError):
        check(found.dag, found.plans[:1], firsts)
    with pytest.raises(PlanError):
        check(found.dag, found.plans)  # as if they were all


def test_present_looks_at_the_list_it_is_given() -> None:
    here = Present([0, 2])

    assert here.of((0, 1, 2)) == (0, 2)
    assert here.of(None) == ()
    assert [here.of((k, k + 1)) for k in range(4)] == [(0,), (2,), (2,), ()]
