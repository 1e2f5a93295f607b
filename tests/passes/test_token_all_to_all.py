"""Around regions of experts, whatever they read and write: what is exchanged, and that it is right.

`plan.numbers` computes all of it on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from draws import one_of
from plan.devices import EARLY, LATE, executed
from plan.expert_programs import scheduled
from plan.numbers import expected
from synthetic import ROW, TOKENS, MoeChain, moe_chain, moe_region

from piper.costs import Costs
from piper.directives import Directive, Order, Place, Replicate, Shard, Split, apply
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.model import Model, Parameter, Region
from piper.ir.nodes import Compute, Exchange
from piper.ir.training import training_dag
from piper.ir.values import Role, TensorSpec, Value
from piper.job.compile.compiler import compile_strategy
from piper.job.compile.pricing import price
from piper.names import ValueId
from piper.passes.token_all_to_all import insert_token_all_to_all
from piper.plan.instructions import Load

SPECS = {"h": ROW, "l": TensorSpec(()), "r": TOKENS, "b": TOKENS, "c": TensorSpec((4,), "int64")}
TWO = [0, 1]
PROGRAM = [Place(where(), TWO), Replicate(where(), TWO, zero=2), Shard(where(EP="*"), TWO)]
SPLIT = Split("MB", 2)
HALVES = Order([where(MB=m, PASS=p) for p in ("F", "BI", "BW") for m in range(2)])


def region(
    name: str, reads: str, writes: str, input_grads: Sequence[int] = (),
    output_grads: Sequence[int] = (), **fields: Any,
) -> Region:  # fmt: skip
    """Its tags are in its name."""
    tags = tuple((tag[:2], int(tag[2:])) for tag in name.partition("#")[0].split("."))
    run = int(name.partition("#")[2] or 0)
    made = moe_region(name, tags, reads.split(), writes.split(), range(0), range(0), run)
    return replace(
        made, input_grads=tuple(input_grads), output_grads=tuple(output_grads),
        weight_output_grads=tuple(output_grads)[-1:], **fields,
    )  # fmt: skip


def model(*regions: Region) -> Model:
    values = {out: Value((SPECS[out[0]],)) for one in regions for out in one.outputs}
    values[ValueId("x")] = Value((ROW,), Role.BATCH)
    buckets = {one.id: MoeChain(1, 1, 4, TOKENS, 0).bucket(one) for one in regions}
    return Model(regions=regions, values=values, buckets=buckets, loss=ValueId("loss"))


FIRST = region("PP0", "x", "h r c", output_grads=[0, 1])
EXPERTS = region("PP0.EP0", "r c", "b", [0], [0])


def with_frozen(found: Model) -> Model:
    """The same with a second bucket of experts, which is not trained."""
    frozen = replace(
        found.buckets["PP0.EP0"], id="frozen", trainable=False,
        parameters=(Parameter("frozen.w", TensorSpec((4, 5))),),
    )  # fmt: skip
    regions = [
        replace(one, buckets=("frozen", *one.buckets), backward_buckets=(0, 1), weight_buckets=(0,))
        if "EP" in one.id
        else one
        for one in found.regions
    ]
    return replace(found, regions=tuple(regions), buckets={**found.buckets, "frozen": frozen})


PLAIN = model(FIRST, EXPERTS, region("PP0#1", "h b", "loss", [0, 1], [0]))
MODELS = {
    "what comes back is read twice": model(
        FIRST, EXPERTS, region("PP0.MM0", "b", "h2", [0], [0]),
        region("PP0#1", "h b h2", "loss", [0, 1, 2], [0]),
    ),
    "rows that need no gradient": model(
        region("PP0", "x", "r c", has_backward=False), region("PP0.EP0", "r c", "b", [], [0]),
        region("PP0#1", "b", "loss", [0], [0]),
    ),
    "the same rows go to two regions": model(
        FIRST, EXPERTS, region("PP0.EP1", "r c", "b2", [0], [0]),
        region("PP0#1", "h b b2", "loss", [0, 1, 2], [0]),
    ),
    "one region of experts after the other": model(
        FIRST, EXPERTS, region("PP0.EP1", "b c", "b2", [0], [0]),
        region("PP0#1", "h b2", "loss", [0, 1], [0]),
    ),
    "two outputs": model(
        FIRST, region("PP0.EP0", "r c", "b b2", [0], [0, 1]),
        region("PP0#1", "h b b2", "loss", [0, 1, 2], [0]),
    ),
    "an output without gradient": model(
        FIRST, region("PP0.EP0", "r c", "b b2", [0], [1]),
        region("PP0#1", "h b b2", "loss", [0, 2], [0]),
    ),
    "an output that nobody reads": model(
        FIRST, region("PP0.EP0", "r c", "b b2", [0], [0]),
        region("PP0#1", "h b", "loss", [0, 1], [0]),
    ),
    "counts before the rows": model(
        FIRST, region("PP0.EP0", "c r", "b", [1], [0], weight_inputs=(1,)),
        region("PP0#1", "h b", "loss", [0, 1], [0]),
    ),
    "no parameters": model(
        FIRST, replace(EXPERTS, buckets=(), backward_buckets=()),
        region("PP0#1", "h b", "loss", [0, 1], [0]),
    ),
    "parameters of two buckets, one of them frozen": with_frozen(PLAIN),
    "no backward": model(
        region("PP0", "x", "h r c", output_grads=[0]),
        region("PP0.EP0", "r c", "b", has_backward=False),
        region("PP0#1", "h b", "loss", [0], [0]),
    ),
}  # fmt: skip


@one_of(3)
@pytest.mark.parametrize("program", [[], [HALVES]], ids=["whole", "halves"])
@pytest.mark.parametrize("name", MODELS)
def test_experts_compute_what_one_device_computes(name: str, program: list[Directive]) -> None:
    found = MODELS[name]
    plans = compile_strategy(found, [*PROGRAM, SPLIT, *program]).plans
    right = expected(found, 2, False, 2, 2)

    for when in (EARLY, LATE):
        assert executed(found, plans, when, 2, {0: 0, 1: 1}) == right


def after(found: Model, *program: Directive) -> Dag:
    return insert_token_all_to_all(apply([*PROGRAM, *program], training_dag(found)))


def lines(dag: Dag) -> list[str]:
    """Experts and what is around them: what they read and write, but for parameters."""
    shown = [n for n in dag.nodes.values() if isinstance(n, Exchange) or "EP" in n.id]
    return [
        f"{n.id}: {' '.join('+'.join(r) for r in n.reads if r[0][:2] != 'w:')} -> "
        f"{' '.join(n.writes)}"
        for n in shown
        if isinstance(n, Exchange | Compute)
    ]


def test_rows_and_counts_leave_and_rows_come_back() -> None:
    assert lines(after(PLAIN)) == [
        "to PP0.EP0:F: r c -> r~PP0.EP0 c~PP0.EP0 route:PP0.EP0",
        "PP0.EP0:F: r~PP0.EP0 c~PP0.EP0 -> b~ saved:PP0.EP0",
        "from PP0.EP0:F: b~ route:PP0.EP0 -> b",
        "to PP0.EP0:B: d:b/PP0#1 route:PP0.EP0 -> d:b/PP0#1~PP0.EP0",
        "PP0.EP0:B: r~PP0.EP0 c~PP0.EP0 saved:PP0.EP0 d:b/PP0#1~PP0.EP0 -> d:r/PP0.EP0~ "
        "g:PP0.EP0/PP0.EP0",
        "from PP0.EP0:B: d:r/PP0.EP0~ route:PP0.EP0 -> d:r/PP0.EP0",
    ]


def test_weight_gradients_find_all_where_it_is() -> None:
    slots = [where(PASS=p) for p in ("F", "BI", "BW")]

    assert lines(after(PLAIN, Order(slots)))[-2:] == [
        "from PP0.EP0:BI: d:r/PP0.EP0~ route:PP0.EP0 -> d:r/PP0.EP0",
        "PP0.EP0:BW: r~PP0.EP0 carry:PP0.EP0 d:b/PP0#1~PP0.EP0 -> g:PP0.EP0/PP0.EP0",
    ]


def test_gradients_that_add_up_travel_as_one() -> None:
    found = lines(after(MODELS["what comes back is read twice"]))

    assert found[3] == ("to PP0.EP0:B: d:b/PP0#1+d:b/PP0.MM0 route:PP0.EP0 -> d:b/PP0#1~PP0.EP0")


def test_rows_without_gradient_do_not_come_back_a_second_time() -> None:
    found = lines(after(MODELS["rows that need no gradient"]))

    assert [row.split(":")[0] for row in found] == [
        "to PP0.EP0", "PP0.EP0", "from PP0.EP0", "to PP0.EP0", "PP0.EP0",
    ]  # fmt: skip


def test_each_microbatch_has_its_own_route() -> None:
    dag = after(PLAIN, SPLIT)
    routes = [
        n.reads[-1] for n in dag.nodes.values() if isinstance(n, Exchange) and n.way != "counted"
    ]

    assert sorted(routes) == [("route:PP0.EP0@0",)] * 3 + [("route:PP0.EP0@1",)] * 3


def test_parameters_and_gradients_are_as_large_as_a_share() -> None:
    dag = after(PLAIN, SPLIT)

    for name in ("w:PP0.EP0", "w:PP0.EP0'", "g:PP0.EP0/PP0.EP0@1"):
        assert [spec.shape for spec in dag.values[ValueId(name)].specs] == [(2, 2, 3), (2,)]
    assert dag.values[ValueId("c@0~PP0.EP0")].specs == (TensorSpec((2,), "int64"),)
    assert [spec.shape for spec in dag.values[ValueId("w:PP0")].specs] == [(4, 4)]


def test_without_experts_nothing_changes() -> None:
    dag = apply(PROGRAM[:2], training_dag(PLAIN))

    assert insert_token_all_to_all(dag) is dag


@pytest.mark.parametrize("mirrored", [False, True])
def test_rows_that_come_with_the_batch_compile(mirrored: bool) -> None:
    """They are loaded where they leave from, also where a device serves two replicas."""
    whole = moe_chain(2 if mirrored else 1)
    given = {"rows0.0", "counts0.0", "rows0", "counts0"}
    values = {
        name: replace(value, role=Role.BATCH) if name in given else value
        for name, value in whole.values.items()
    }
    first, experts, *rest = whole.regions
    rest[0] = replace(
        rest[0],
        inputs=tuple(v for v in rest[0].inputs if v not in first.outputs),
        input_grads=(0,),
        backward_inputs=(0,),
    )
    regions = (replace(experts, input_grads=()), *rest)
    found = replace(whole, values=values, regions=regions)
    places = [Place(where(PP=0), [0, 1]), Place(where(PP=1), [1, 0])][: 1 + mirrored]
    keep = [Replicate(where(PP=s), [0, 1]) for s in range(1 + mirrored)]
    cut = [Shard(where(PP=s, EP="*"), [0, 1]) for s in range(1 + mirrored)]

    compiled = compile_strategy(found, [*places, *keep, *cut, SPLIT])

    every = [one for plan in compiled.plans for one in plan.instructions]
    assert any(isinstance(one, Load) and one.value.startswith("rows") for one in every)


@one_of(2)
@pytest.mark.parametrize("name", ["dualpipev", "dualpipe"])
def test_slots_that_overlap_hide_more_of_the_journeys(name: str) -> None:
    """On a clock that both were ordered by; and weight gradients run in a later slot."""
    costs = Costs(ahead=True, link=50.0, latency=0.2)
    dp = 1 if name == "dualpipe" else 2
    found = {}
    for ahead in (True, "pairs"):
        strategy = scheduled(name, 8, dp, 2, ahead=ahead)
        stages = sum(isinstance(one, Place) for one in strategy)
        compiled = compile_strategy(moe_chain(stages, experts=2), strategy, costs=costs)
        found[ahead] = price(compiled, costs).seconds

    assert found["pairs"] < 0.98 * found[True]


def test_a_weight_gradient_may_be_later_but_not_for_ever() -> None:
    """It is done before the slots after the next two begin."""
    order = Order([[where(PP=0, MB=m, PASS="F"), where(PP=0, MB=m, PASS="B")] for m in range(6)])
    loose = replace(order, ahead="pairs")
    places = [Place(where(), TWO), Replicate(where(), TWO), Shard(where(EP="*"), TWO)]

    def before(order: Order) -> set[tuple[str, str]]:
        strategy = [*places, Split("MB", 6), order]
        dag = compile_strategy(moe_chain(1, experts=2), strategy).dag
        pairs = ((a, b) for p in dag.precedences for a in p.before for b in p.after)
        return {(a, b) for a, b in pairs if a == "PP0.EP0:BW@0" and b.startswith("PP0.EP0:F@")}

    assert before(order) == {("PP0.EP0:BW@0", "PP0.EP0:F@1")}
    assert before(loose) == {("PP0.EP0:BW@0", "PP0.EP0:F@4")}
